// bn_reduce, abn_reduce, bn_backward, abn_backward on the CPU: the O(C) part, in double: tables, the sum of
// the slices' sums, and their shares.
#include <cmath>

#include "../sync/cpu_peer.h"
#include "channels.h"
#include "kernels.h"

namespace fastvit {
namespace {

// What both kernels take: of xhat the limit, and tables in the first rows.
template <class A, class Args>
GradientParams<Args> gradient_params(const Args& args, Tables<A>& table) {
  const int64_t C = args.layout.C;
  const A* saved = static_cast<const A*>(args.saved);
  for (int64_t c = 0; c < C; ++c) {
    table[0][c] =
        A(load_channel(args.weight, c, 1) * double(saved[C + c]));  // the floor applies to the inversion only
    table[1][c] = A(load_channel(args.bias, c, 0));
    table[2][c] = A(1 / gamma_of(args, c));
  }
  const double limit = std::sqrt(std::max(load_count(saved + 2 * C) - 1, 0.0));
  return {args, partition_of(args.layout), limit, table[0], table[1], table[2]};
}

}  // namespace

// No launch to save on a CPU: two ops run one after the other.
bool Backend::backward_on_chip(const BackwardArgs&) {
  return false;
}

void Backend::reduce(const ReduceArgs& args) {
  const int64_t C = args.layout.C;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* saved = static_cast<const A*>(args.saved);
    A* sums = static_cast<A*>(args.sums);
    Tables<A> table(3, C);
    ReduceParams params{gradient_params(args, table)};
    const int64_t slices = params.partition.slices;
    std::vector<double> partial(slices * 2 * C);
    params.partial = partial.data();
    if (args.layout.numel() > 0) kernels().reduce(params);
    for (int64_t s = 1; s < slices; ++s)
      for (int64_t i = 0; i < 2 * C; ++i) partial[i] += partial[s * 2 * C + i];
    for (int64_t c = 0; c < C; ++c) {
      sums[c] = A(partial[c]);
      sums[C + c] = A(args.in_place ? partial[C + c] : partial[C + c] * double(saved[C + c]));
    }
    if (args.exchange) share(*args.exchange, sums, sums + 2 * C, C);
  });
}

void Backend::backward(const BackwardArgs& args) {
  const int64_t C = args.layout.C;
  if (args.layout.numel() == 0) return;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A *saved = static_cast<const A*>(args.saved), *sums = static_cast<const A*>(args.sums);
    const double count = load_count(saved + 2 * C);
    Tables<A> table(5, C);
    for (int64_t c = 0; sums && count > 0 && c < C; ++c) {
      table[3][c] = A(sums[c] / count);
      table[4][c] = A(sums[C + c] / count * (args.in_place ? 1 : double(saved[C + c])));
    }
    kernels().backward({gradient_params(args, table), table[3], table[4]});
  });
}

}  // namespace fastvit
