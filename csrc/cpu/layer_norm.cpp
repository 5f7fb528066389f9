// layer_norm_forward, layer_norm_backward on the CPU: tables, and the sum of the slices' sums in double.
#include <algorithm>

#include "channel_vector.h"
#include "kernel_table.h"

namespace fastvit {
namespace {

constexpr int64_t kRowsPerSlice = 16;  // at least: keeps a slice's sums smaller than its rows

// weight or bias in the accumulation type.
template <class A>
std::vector<A> column_table(const ChannelVector& parameter, int64_t columns, double absent) {
  std::vector<A> table(columns);
  for (int64_t c = 0; c < columns; ++c) table[c] = A(load_channel(parameter, c, absent));
  return table;
}

}  // namespace

void backend::layer_norm_forward(const LayerNormArgs& args) {
  if (args.rows == 0) return;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const auto gamma = column_table<A>(args.weight, args.columns, 1),
               beta = column_table<A>(args.bias, args.columns, 0);
    kernel_table().layer_norm_forward({args, gamma.data(), beta.data()});
  });
}

void backend::layer_norm_backward(const LayerNormArgs& args) {
  const int64_t D = args.columns, stride = ceil_div(D, 16) * 16;
  const int64_t slices = std::clamp<int64_t>(
      std::min(ceil_div(args.rows * D, kMinTaskElements), args.rows / kRowsPerSlice), 1, kMaxSlices);
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const auto gamma = column_table<A>(args.weight, D, 1);
    std::vector<A> chunk_sums(args.sums ? slices * 2 * stride : 0);
    std::vector<double> partial(args.sums ? slices * 2 * D : 0);
    if (args.rows > 0)
      kernel_table().layer_norm_backward(
          {args, slices, gamma.data(), stride, chunk_sums.data(), partial.data()});
    A* sums = static_cast<A*>(args.sums);
    for (int64_t i = 0; sums && i < 2 * D; ++i) {
      double sum = 0;
      for (int64_t s = 0; s < slices; ++s) sum += partial[s * 2 * D + i];
      sums[i] = A(sum);
    }
  });
}

}  // namespace fastvit
