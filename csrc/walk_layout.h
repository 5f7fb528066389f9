// WalkLayout: the order in which an op visits the elements of its tensors, for any strides, without a copy.
//
// A batch norm treats all dimensions of an activation alike, except that of the channels. So the other
// dimensions may be visited in any order, and two of them are merged into one where the strides allow it. The
// fastest dimension, the one with the smallest stride, then decides between two walks:
//   planes  The fastest dimension is not that of the channels, as in NCHW. A plane has the `inner` elements
//           of one channel along the fastest dimension. There are outer * channels planes.
//   rows    The fastest dimension is that of the channels, as in channels_last, tokens (N, L, C) and (N, C).
//           A row has one element of each channel. There are `outer` rows, and `inner` is 1.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastvit {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kMaxDims = 5;                  // (N, C, D, H, W)
constexpr int kMaxOuterDims = kMaxDims - 1;  // all but the channels
constexpr int kMaxOperands = 5;              // bn_backward: input, dy, dx, residual, dresidual

// The strides of one operand, a tensor that an op reads or writes; in elements. The operands of an op have
// equal sizes, but may differ in strides.
struct Strides {
  int64_t outer[kMaxOuterDims] = {};
  int64_t channel = 0;
  int64_t inner = 0;  // 0 for rows, whose inner dimension has one element
};

// Examples, for an op whose operands have equal strides:
//   tensor                                 walk    outer_size  channels  inner
//   (N, C, H, W), contiguous               planes  N           C         H * W
//   (N, C, H, W), cropped: wider[..., :W]  planes  N, H        C         W
//   (N, C, H, W), channels_last            rows    N * H * W   C         1
//   (N, L, C), contiguous, channel_dim 2   rows    N * L       C         1
//   (N, C), contiguous                     rows    N           C         1
struct WalkLayout {
  bool is_rows = false;                    // false: planes
  int outer_dims = 0;                      // the used entries of outer_size and of Strides::outer
  int64_t outer_size[kMaxOuterDims] = {};  // the slowest dimension first
  int64_t outer = 1;                       // the product of outer_size; 0 if the tensors are empty
  int64_t channels = 1, inner = 1;
  Strides strides[kMaxOperands];  // by the structs *OperandIndex of batch_norm.h, activation_ops.h

  FASTVIT_HOST_DEVICE int64_t numel() const { return outer * channels * inner; }
  FASTVIT_HOST_DEVICE int64_t values_per_channel() const { return outer * inner; }
};

// The operands of an op, before their dimensions are sorted and merged.
struct OperandDims {
  int num_dims;
  const int64_t* sizes;  // [num_dims], of every operand
  int channel_dim;
  int num_operands;
  const int64_t* const* strides;  // [num_operands][num_dims]

  // True if the tensors have no elements.
  bool is_empty() const {
    for (int d = 0; d < num_dims; ++d)
      if (sizes[d] == 0) return true;
    return false;
  }

  // Writes the indices of the dimensions to `order`, without the channels' and those of size 1. The dimension
  // with the largest stride of the first operand comes first. Returns how many it has written.
  int order_by_stride(int* order) const {
    const int64_t* const first_strides = strides[0];
    int sorted = 0;
    for (int d = 0; d < num_dims; ++d) {
      if (d == channel_dim || sizes[d] == 1) continue;
      int place = sorted++;  // an insertion sort, which keeps dimensions of equal strides in their order
      for (; place > 0 && first_strides[order[place - 1]] < first_strides[d]; --place)
        order[place] = order[place - 1];
      order[place] = d;
    }
    return sorted;
  }
};

// The dimensions other than the channels', sorted by their strides and merged as far as all operands allow.
struct MergedDims {
  int count = 0;
  int64_t size[kMaxOuterDims];
  int64_t stride[kMaxOperands][kMaxOuterDims];

  explicit MergedDims(const OperandDims& operand_dims) {
    int order[kMaxOuterDims];
    const int sorted = operand_dims.order_by_stride(order);
    for (int i = 0; i < sorted; ++i) append(operand_dims, order[i]);
  }

 private:
  // True if in every operand the last merged dimension's stride is strides[d] * sizes[d]. Then the two
  // dimensions are one dimension with the stride of d.
  bool can_merge_with_last(const OperandDims& operand_dims, int d) const {
    if (count == 0) return false;
    for (int k = 0; k < operand_dims.num_operands; ++k)
      if (stride[k][count - 1] != operand_dims.strides[k][d] * operand_dims.sizes[d]) return false;
    return true;
  }

  // Adds dimension d after the last merged dimension, or merges the two.
  void append(const OperandDims& operand_dims, int d) {
    if (!can_merge_with_last(operand_dims, d)) size[count++] = 1;
    size[count - 1] *= operand_dims.sizes[d];
    for (int k = 0; k < operand_dims.num_operands; ++k) stride[k][count - 1] = operand_dims.strides[k][d];
  }
};

// True for rows, false for planes. The first operand's strides decide. A merged dimension of stride 1 is the
// fastest even if the channels' stride is 1 or 0. Without a merged dimension the walk is rows, else with one
// channel it is planes.
inline bool is_walked_as_rows(const OperandDims& operand_dims, const MergedDims& merged) {
  if (merged.count == 0) return true;
  const int64_t fastest_stride = merged.stride[0][merged.count - 1];
  return fastest_stride != 1 && operand_dims.sizes[operand_dims.channel_dim] > 1 &&
         operand_dims.strides[0][operand_dims.channel_dim] < fastest_stride;
}

// sizes: [num_dims], of every operand. strides: [num_operands][num_dims].
inline WalkLayout make_walk_layout(int num_dims, const int64_t* sizes, int channel_dim, int num_operands,
                                   const int64_t* const* strides) {
  const OperandDims operand_dims{num_dims, sizes, channel_dim, num_operands, strides};
  WalkLayout layout;
  layout.channels = sizes[channel_dim];
  for (int k = 0; k < num_operands; ++k) layout.strides[k].channel = strides[k][channel_dim];
  if (operand_dims.is_empty()) {
    layout.outer = 0;
    return layout;
  }

  const MergedDims merged(operand_dims);
  layout.is_rows = is_walked_as_rows(operand_dims, merged);
  layout.outer_dims = layout.is_rows ? merged.count : merged.count - 1;
  for (int i = 0; i < layout.outer_dims; ++i) {
    layout.outer *= layout.outer_size[i] = merged.size[i];
    for (int k = 0; k < num_operands; ++k) layout.strides[k].outer[i] = merged.stride[k][i];
  }
  if (!layout.is_rows) {
    layout.inner = merged.size[merged.count - 1];
    for (int k = 0; k < num_operands; ++k) layout.strides[k].inner = merged.stride[k][merged.count - 1];
  }
  return layout;
}

}  // namespace fastvit
