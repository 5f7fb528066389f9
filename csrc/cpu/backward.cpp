// bn_backward, abn_backward on the CPU: the O(C) part, in double: tables of the sums' shares.
#include <cmath>

#include "backend.h"
#include "channels.h"
#include "kernels.h"

namespace fastvit {

void Cpu::backward(const BackwardArgs& args) {
  const int64_t C = args.layout.C;
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const A* saved = static_cast<const A*>(args.saved);
    const A* sums = static_cast<const A*>(args.sums);
    const double count = load_count(saved + 2 * C);
    Tables<A> table(5, C);
    for (int64_t c = 0; c < C; ++c) {
      const double invstd = saved[C + c];
      table[0][c] = A(number(args.weight, c, 1) * invstd);  // the floor applies to the inversion only
      table[1][c] = A(number(args.bias, c, 0));
      table[2][c] = A(1 / gamma_of(args, c));
      table[3][c] = sums && count > 0 ? A(sums[c] / count) : A(0);
      table[4][c] = sums && count > 0 ? A(sums[C + c] / count * (args.in_place ? 1 : invstd)) : A(0);
    }
    if (args.layout.numel() > 0)
      kernels().backward({args, partition_of(args.layout), std::sqrt(std::max(count - 1, 0.0)), table[0],
                          table[1], table[2], table[3], table[4]});
  });
}

}  // namespace fastvit
