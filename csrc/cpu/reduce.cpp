// bn_reduce, abn_reduce on the CPU: the O(C) part, in double: tables, and the sum of the slices' sums.
#include <cmath>

#include "../sync/cpu_peer.h"
#include "backend.h"
#include "channels.h"
#include "kernels.h"

namespace fastvit {

void Cpu::reduce(const ReduceArgs& args) {
  const int64_t C = args.layout.C;
  const Partition partition = partition_of(args.layout);
  std::vector<double> partial(partition.slices * 2 * C);
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const A* saved = static_cast<const A*>(args.saved);
    A* sums = static_cast<A*>(args.sums);
    const double count = load_count(saved + 2 * C);
    Tables<A> table(3, C);
    for (int64_t c = 0; c < C; ++c) {
      const double gamma = gamma_of(args, c);
      table[0][c] = A(gamma * double(saved[C + c]));
      table[1][c] = A(number(args.bias, c, 0));
      table[2][c] = A(1 / gamma);
    }
    if (args.layout.numel() > 0)
      kernels().reduce({args, partition, std::sqrt(std::max(count - 1, 0.0)), table[0], table[1], table[2],
                        partial.data()});
    for (int64_t s = 1; s < partition.slices; ++s)
      for (int64_t i = 0; i < 2 * C; ++i) partial[i] += partial[s * 2 * C + i];
    for (int64_t c = 0; c < C; ++c) {
      sums[c] = A(partial[c]);
      sums[C + c] = A(args.in_place ? partial[C + c] : partial[C + c] * double(saved[C + c]));
    }
    if (args.exchange) share(*args.exchange, sums, sums + 2 * C, C);
  });
}

}  // namespace fastvit
