// Views every activation of an op as (outer..., C, inner), without a copy.
//
// The dimensions other than the channel's are sorted by the first operand's strides and merged wherever all
// operands allow it. The result is walked as N x M spans:
//   planes  (NCHW, and anything whose fastest dimension is not the channel): a span is the innermost
//           dimension, S long; M = C; N counts the rest.
//   rows    (channels_last, tokens, (N, C)): a span is the C channels; M = 1; N counts everything else.
// A contiguous NCHW tensor has one outer dimension, N; a channels_last tensor has one, N * H * W.
// Strides are arbitrary and per operand, which covers cropped, transposed and expanded tensors.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastvit {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kMaxDims = 5;              // (N, C, D, H, W)
constexpr int kMaxOuter = kMaxDims - 1;  // all but the channel
constexpr int kMaxOperands = 5;          // input, dy, dx, residual, dresidual

struct Strides {  // in elements
  int64_t outer[kMaxOuter] = {};
  int64_t channel = 0;
  int64_t inner = 0;
};

struct WalkLayout {
  bool is_rows = false;
  int outer_dims = 0;
  int64_t outer_size[kMaxOuter] = {};
  int64_t outer = 1, channels = 1, inner = 1;
  Strides strides[kMaxOperands];

  FASTVIT_HOST_DEVICE int64_t numel() const { return outer * channels * inner; }
  FASTVIT_HOST_DEVICE int64_t values_per_channel() const { return outer * inner; }  // values per channel
};

inline WalkLayout make_walk_layout(int dims, const int64_t* sizes, int channel_dim, int operands,
                                   const int64_t* const* strides) {
  WalkLayout layout;
  layout.channels = sizes[channel_dim];
  bool empty = layout.channels == 0;
  int order[kMaxOuter];
  int sorted = 0;
  for (int d = 0; d < dims; ++d) {
    empty = empty || sizes[d] == 0;
    if (d == channel_dim || sizes[d] == 1) continue;
    int at = sorted++;  // insertion sort, stable, largest stride of the first operand first
    for (; at > 0 && strides[0][order[at - 1]] < strides[0][d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  for (int k = 0; k < operands; ++k) layout.strides[k].channel = strides[k][channel_dim];
  if (empty) {
    layout.outer = 0;
    return layout;
  }

  int64_t size[kMaxOuter];
  int64_t stride[kMaxOperands][kMaxOuter];
  int merged = 0;
  for (int i = 0; i < sorted; ++i) {
    const int d = order[i];
    bool joins = merged > 0;
    for (int k = 0; k < operands && joins; ++k) joins = stride[k][merged - 1] == strides[k][d] * sizes[d];
    if (!joins) size[merged++] = 1;
    size[merged - 1] *= sizes[d];
    for (int k = 0; k < operands; ++k) stride[k][merged - 1] = strides[k][d];
  }

  // The walk follows the unit stride of the first operand, or the channels if it has none.
  layout.is_rows = merged == 0 || (stride[0][merged - 1] != 1 && layout.channels > 1 &&
                                   strides[0][channel_dim] < stride[0][merged - 1]);
  layout.outer_dims = layout.is_rows ? merged : merged - 1;
  for (int i = 0; i < layout.outer_dims; ++i) {
    layout.outer *= layout.outer_size[i] = size[i];
    for (int k = 0; k < operands; ++k) layout.strides[k].outer[i] = stride[k][i];
  }
  if (!layout.is_rows) {
    layout.inner = size[merged - 1];
    for (int k = 0; k < operands; ++k) layout.strides[k].inner = stride[k][merged - 1];
  }
  return layout;
}

}  // namespace fastvit
