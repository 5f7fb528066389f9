// WalkLayout: in which order an op visits the elements of its tensors. It has any strides, and needs no copy.
//
// A batch norm treats all dimensions of an activation alike, except that of the channels. So the other
// dimensions may be visited in any order, and two of them may be merged into one. There are two walks:
//   planes  The fastest dimension, which has the smallest stride, is not the channels', as in NCHW. A plane
//           is that dimension: `inner` elements of one channel. There are outer * channels planes.
//   rows    The channels are the fastest dimension, as in channels_last, tokens (N, L, C) and (N, C).
//           A row is one element of each channel. There are `outer` rows, and `inner` is 1.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastvit {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kMaxDims = 5;                  // (N, C, D, H, W)
constexpr int kMaxOuterDims = kMaxDims - 1;  // all but the channels
constexpr int kMaxOperands = 5;              // tensors of an op: input, dy, dx, residual, dresidual

// The strides of one operand, in elements. The operands of an op have equal sizes, but may differ in strides.
struct Strides {
  int64_t outer[kMaxOuterDims] = {};
  int64_t channel = 0;
  int64_t inner = 0;  // 0 for rows, whose inner dimension has one element
};

// Examples, for an op whose operands have equal strides:
//   tensor                               walk    outer_size  channels  inner
//   (N, C, H, W), contiguous             planes  N           C         H * W
//   (N, C, H, W), cropped: x[..., :W]    planes  N, H        C         W
//   (N, C, H, W), channels_last          rows    N * H * W   C         1
//   (N, L, C), contiguous, channel_dim 2 rows    N * L       C         1
//   (N, C), contiguous                   rows    N           C         1
struct WalkLayout {
  bool is_rows = false;                    // false: planes
  int outer_dims = 0;                      // the used entries of outer_size and of Strides::outer
  int64_t outer_size[kMaxOuterDims] = {};  // the slowest dimension first
  int64_t outer = 1;                       // the product of outer_size; 0 if the tensors are empty
  int64_t channels = 1, inner = 1;
  Strides strides[kMaxOperands];  // of each operand; batch_norm.h and activation_ops.h name the places

  FASTVIT_HOST_DEVICE int64_t numel() const { return outer * channels * inner; }
  FASTVIT_HOST_DEVICE int64_t values_per_channel() const { return outer * inner; }
};

// The operands of an op, before their dimensions are sorted and merged.
struct OperandDims {
  int dims;
  const int64_t* sizes;  // [dims]; the same for all operands
  int channel_dim;
  int operands;
  const int64_t* const* strides;  // [operands][dims]

  // True if the tensors have no elements.
  bool is_empty() const {
    for (int d = 0; d < dims; ++d)
      if (sizes[d] == 0) return true;
    return false;
  }

  // Writes the dimensions that have several elements and are not the channels' to `order`: the dimension with
  // the largest stride of the first operand comes first. Returns the number of these dimensions.
  int order_by_stride(int* order) const {
    const int64_t* const first_strides = strides[0];
    int sorted = 0;
    for (int d = 0; d < dims; ++d) {
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
  // True if, in every operand, one step of the last merged dimension is as far as all of dimension d: then
  // both together are one dimension with d's stride.
  bool continues_with(const OperandDims& operand_dims, int d) const {
    if (count == 0) return false;
    for (int k = 0; k < operand_dims.operands; ++k)
      if (stride[k][count - 1] != operand_dims.strides[k][d] * operand_dims.sizes[d]) return false;
    return true;
  }

  void append(const OperandDims& operand_dims, int d) {
    if (!continues_with(operand_dims, d)) size[count++] = 1;
    size[count - 1] *= operand_dims.sizes[d];
    for (int k = 0; k < operand_dims.operands; ++k) stride[k][count - 1] = operand_dims.strides[k][d];
  }
};

// True for rows: the channels are the fastest dimension of the first operand, or no other dimension is left.
// Another dimension of stride 1 counts as the fastest even if the channels have stride 1 too, or 0.
inline bool walks_rows(const OperandDims& operand_dims, const MergedDims& merged) {
  if (merged.count == 0) return true;
  const int64_t fastest_stride = merged.stride[0][merged.count - 1];
  return fastest_stride != 1 && operand_dims.sizes[operand_dims.channel_dim] > 1 &&
         operand_dims.strides[0][operand_dims.channel_dim] < fastest_stride;
}

inline WalkLayout make_walk_layout(int dims, const int64_t* sizes, int channel_dim, int operands,
                                   const int64_t* const* strides) {
  const OperandDims operand_dims{dims, sizes, channel_dim, operands, strides};
  WalkLayout layout;
  layout.channels = sizes[channel_dim];
  for (int k = 0; k < operands; ++k) layout.strides[k].channel = strides[k][channel_dim];
  if (operand_dims.is_empty()) {
    layout.outer = 0;
    return layout;
  }

  const MergedDims merged(operand_dims);
  layout.is_rows = walks_rows(operand_dims, merged);
  layout.outer_dims = layout.is_rows ? merged.count : merged.count - 1;
  for (int i = 0; i < layout.outer_dims; ++i) {
    layout.outer *= layout.outer_size[i] = merged.size[i];
    for (int k = 0; k < operands; ++k) layout.strides[k].outer[i] = merged.stride[k][i];
  }
  if (!layout.is_rows) {
    layout.inner = merged.size[merged.count - 1];
    for (int k = 0; k < operands; ++k) layout.strides[k].inner = merged.stride[k][merged.count - 1];
  }
  return layout;
}

}  // namespace fastvit
