// Walks activations of any strides span by span, and selects a kernel by dtype and activation.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../../activation_functions.h"
#include "../kernel_table.h"
#include "simd.h"

namespace fastvit {
namespace FASTVIT_ISA {

// One operand. A span with unit stride is read and written in place. Any other is copied to a buffer on the
// stack and back.
template <class T>
struct StridedOperand {
  T* data;
  Strides strides;
  int64_t stride;  // between elements of a span
  const WalkLayout* layout;

  StridedOperand(const void* pointer, const WalkLayout& layout_, int operand)
      : data(static_cast<T*>(const_cast<void*>(pointer))),
        strides(layout_.strides[operand]),
        stride(layout_.is_rows ? strides.channel : strides.inner),
        layout(&layout_) {}

  int64_t outer(int64_t n) const {
    if (layout->outer_dims == 1) return n * strides.outer[0];
    int64_t offset = 0;
    for (int d = layout->outer_dims - 1; d >= 0; --d) {
      offset += n % layout->outer_size[d] * strides.outer[d];
      n /= layout->outer_size[d];
    }
    return offset;
  }
  T* at(int64_t outer, int64_t c, int64_t s) const {
    return data + (outer + c * strides.channel + s * strides.inner);
  }
  bool has_unit_stride(int64_t n) const { return stride == 1 || n == 1; }
  const T* read(T* span, int64_t n, T* buffer) const {
    if (has_unit_stride(n)) return span;
    for (int64_t i = 0; i < n; ++i) buffer[i] = span[i * stride];
    return buffer;
  }
  void write(T* span, int64_t n, const T* buffer) const {
    for (int64_t i = 0; i < n; ++i) span[i * stride] = buffer[i];
  }
};

// A per-channel constant along a span: one number for a plane, a vector of the table for a row.
template <class A, bool kIsRows>
struct ChannelConstant {
  const A* table;
  Simd<A> value;
  ChannelConstant(const void* table_, int64_t c)
      : table(static_cast<const A*>(table_) + c), value(Simd<A>{} + (kIsRows ? A(0) : *table)) {}
  template <class Position>
  FASTVIT_HOST_DEVICE Simd<A> at(Position at) const {
    return kIsRows ? at.load(table) : value;
  }
};

// A task of a reduction: steps [first, last), which are a slice, of channels [c0, c1).
struct Task {
  int64_t slice, first, last, c0, c1;
};

// f(task) for every task of a reduction.
template <class F>
void for_each_task(const WalkLayout& layout, const CpuPlan& plan, const F& f) {
  torch::stable::parallel_for(0, plan.slices * plan.tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slice = i / plan.tiles, tile = i % plan.tiles;
      f(Task{slice, plan.units * slice / plan.slices, plan.units * (slice + 1) / plan.slices,
             layout.channels * tile / plan.tiles, layout.channels * (tile + 1) / plan.tiles});
    }
  });
}

constexpr int64_t kGrain = 32768;  // fewest elements that are worth a thread

inline int64_t parallel_grain(int64_t piece) {
  return piece > 0 && kGrain > piece ? kGrain / piece : 1;
}

// Results of 32 MiB or more leave the caches before the next op reads them. Written past the caches they take
// 0.73 to 0.84 of the time in fp32 where spans are long, because their lines are not read first.
template <class T>
bool bypasses_cache(int64_t elements) {
  constexpr int64_t kLeast = 32 << 20;
  return elements * int64_t(sizeof(T)) >= kLeast;
}

// Pieces of n elements that follow each other, in the operands that a kernel reads and writes: `count` whole
// planes of channels c, c + 1, ..., or rows from channel c on, or a part of one.
template <class T>
struct SpanGroup {
  const T* from[3];
  T* to[2];
  int64_t from_stride[3], to_stride[2];
  int64_t count, n, c;
  bool streams;

  const T* in(int i, int64_t k) const { return from[i] + k * from_stride[i]; }
  T* out(int i, int64_t k) const { return to[i] + k * to_stride[i]; }
};

// run(args, spans) for all span pieces of `ins` operands and `outs` results, in the order of memory; threads
// take contiguous ranges. A call by pointer: the walk is compiled once for all activations.
template <class T, class Args>
void for_each_span(const Args& args, const StridedOperand<T>* in, int ins, const StridedOperand<T>* out,
                   int outs, void (*run)(const Args&, const SpanGroup<T>&)) {
  const WalkLayout& layout = args.layout;
  const CpuPlan& plan = args.plan;
  bool unit_stride = true, streams = outs == 1 && bypasses_cache<T>(layout.numel());
  for (int i = 0; i < ins; ++i) {
    unit_stride = unit_stride && in[i].stride == 1;
    streams = streams && in[i].data != out[0].data;
  }
  for (int i = 0; i < outs; ++i) unit_stride = unit_stride && out[i].stride == 1;
  const bool together = unit_stride && plan.segments == 1 && (!layout.is_rows || layout.outer_dims == 1);
  const auto stride_of = [&](const Strides& strides) {
    return layout.is_rows ? strides.outer[0] : strides.channel;
  };
  const int64_t span = layout.is_rows ? layout.channels : layout.inner;
  const int64_t channels = layout.is_rows ? 1 : layout.channels,
                positions = layout.outer * channels * plan.segments;
  const auto walk = [&]<bool kUnitStride>(int64_t begin, int64_t end) {
    T in_buffer[3][kUnitStride ? 1 : kMaxSegment], out_buffer[2][kUnitStride ? 1 : kMaxSegment];
    SpanGroup<T> spans;
    for (int i = 0; i < ins; ++i) spans.from_stride[i] = stride_of(in[i].strides);
    for (int i = 0; i < outs; ++i) spans.to_stride[i] = stride_of(out[i].strides);
    spans.streams = kUnitStride && streams;
    for (int64_t position = begin; position < end; position += spans.count) {
      const int64_t first = position % plan.segments * plan.segment_length;
      const int64_t m = position / plan.segments % channels, n = position / plan.segments / channels;
      const int64_t c = layout.is_rows ? first : m, s = layout.is_rows ? 0 : first;
      const int64_t left = end - position, in_image = layout.is_rows ? left : channels - m;
      spans.count = !together ? 1 : left < in_image ? left : in_image;
      spans.n = span - first < plan.segment_length ? span - first : plan.segment_length;
      spans.c = c;
      T* written[2];
      for (int i = 0; i < ins; ++i) {
        T* const at = in[i].at(in[i].outer(n), c, s);
        spans.from[i] = kUnitStride ? at : in[i].read(at, spans.n, in_buffer[i]);
      }
      for (int i = 0; i < outs; ++i) {
        written[i] = out[i].at(out[i].outer(n), c, s);
        spans.to[i] = kUnitStride || out[i].stride == 1 ? written[i] : out_buffer[i];
      }
      run(args, spans);
      for (int i = 0; i < outs; ++i)
        if (spans.to[i] != written[i]) out[i].write(written[i], spans.n, spans.to[i]);
    }
    if (kUnitStride && streams) fence_non_temporal();
  };
  torch::stable::parallel_for(0, positions, parallel_grain(plan.segment_length),
                              [&](int64_t begin, int64_t end) {
                                unit_stride ? walk.template operator()<true>(begin, end)
                                            : walk.template operator()<false>(begin, end);
                              });
}

// f.template operator()<T>() for a dtype.
template <class F>
void dispatch_storage_type(ScalarType dtype, const F& f) {
  fastvit::dispatch_storage_type<Half, BFloat16>(dtype, f);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
