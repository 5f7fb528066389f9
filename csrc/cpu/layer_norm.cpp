// layer_norm_forward and layer_norm_backward on the CPU. This file converts gamma and beta to the
// accumulation type, and adds the sums of the slices (ranges of rows) that the kernel returns.
#include <algorithm>

#include "channel_vector.h"
#include "kernel_table.h"

namespace fastvit {
namespace {

// A slice has four sums per column: two of the accumulation type and two doubles. With fewer rows they would
// take a large part of the memory of the rows themselves.
constexpr int64_t kMinLayerNormRowsPerSlice = 16;
constexpr int64_t kMaxLanes = 16;  // of a SIMD register: AVX-512 and float

// A: the accumulation type.
template <class A>
std::vector<A> convert_parameter(const ChannelVector& parameter, int64_t columns, double value_if_null) {
  std::vector<A> values(columns);
  for (int64_t c = 0; c < columns; ++c) values[c] = A(load_channel(parameter, c, value_if_null));
  return values;
}

}  // namespace

void backend::layer_norm_forward(const LayerNormArgs& args) {
  if (args.rows == 0) return;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const auto gamma = convert_parameter<A>(args.weight, args.columns, /*value_if_null=*/1),
               beta = convert_parameter<A>(args.bias, args.columns, /*value_if_null=*/0);
    kernel_table().layer_norm_forward({args, gamma.data(), beta.data()});
  });
}

void backend::layer_norm_backward(const LayerNormArgs& args) {
  const int64_t columns = args.columns, padded_columns = ceil_div(columns, kMaxLanes) * kMaxLanes;
  const int64_t slices = std::clamp<int64_t>(
      std::min(ceil_div(args.rows * columns, kMinTaskElements), args.rows / kMinLayerNormRowsPerSlice), 1,
      kMaxSlices);
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const auto gamma = convert_parameter<A>(args.weight, columns, /*value_if_null=*/1);
    // The kernel sums up to 128 rows, a chunk, in chunk_sums, and adds these to slice_sums in double.
    std::vector<A> chunk_sums(args.sums ? slices * 2 * padded_columns : 0);
    std::vector<double> slice_sums(args.sums ? slices * 2 * columns : 0);
    if (args.rows > 0)
      kernel_table().layer_norm_backward(
          {args, slices, gamma.data(), padded_columns, chunk_sums.data(), slice_sums.data()});
    A* sums = static_cast<A*>(args.sums);
    for (int64_t i = 0; sums && i < 2 * columns; ++i) {
      double sum = 0;
      for (int64_t slice = 0; slice < slices; ++slice) sum += slice_sums[slice * 2 * columns + i];
      sums[i] = A(sum);
    }
  });
}

}  // namespace fastvit
