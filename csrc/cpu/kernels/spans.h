// Walks the tensors of an op span by span, whatever their strides, and selects a kernel by dtype.
//
// A span is a run of elements that a kernel processes in order. WalkLayout has two kinds of walk:
//   planes  NCHW, and all layouts whose fastest dimension is not the channel: a span is one channel's plane,
//           its `inner` elements. There are outer * channels spans.
//   rows    channels_last, tokens, (N, C): a span is a row, one element of each channel. There are `outer`.
// A long span is processed in segments of at most kMaxSegmentLength elements.
// T: storage type of the tensors. A: accumulation type.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../../activation_functions.h"
#include "../kernel_table.h"
#include "simd.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles the kernels once per instruction set, each in its own namespace

// Not std::min: the linker keeps one instance of it, perhaps that of another instruction set.
FASTVIT_FORCE_INLINE int64_t minimum(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// A tensor as the walk sees it. A span whose elements lie side by side is used where it lies; any other span
// is gathered into a buffer on the stack, and scattered from one.
template <class T>
struct StridedOperand {
  T* data;
  Strides strides;
  int64_t element_stride;  // between the elements of a span
  const WalkLayout* layout;

  // args: a kernel's parameters. operand_index: the tensor's place in layout.strides.
  template <class Args>
  StridedOperand(const void* tensor_data, const Args& args, int operand_index)
      : data(static_cast<T*>(const_cast<void*>(tensor_data))),
        strides(args.layout.strides[operand_index]),
        element_stride(args.layout.is_rows ? strides.channel : strides.inner),
        layout(&args.layout) {
    if (data) data += args.plan.first_channel * strides.channel;
  }

  // The offset, in elements, of outer index n < layout->outer. The last outer dimension is the fastest.
  int64_t outer_offset(int64_t n) const {
    if (layout->outer_dims == 1) return n * strides.outer[0];
    int64_t offset = 0;
    for (int d = layout->outer_dims - 1; d >= 0; --d) {
      offset += n % layout->outer_size[d] * strides.outer[d];
      n /= layout->outer_size[d];
    }
    return offset;
  }
  // The address of element `inner` of the channel's plane at outer index n. With rows `inner` is 0.
  T* address(int64_t n, int64_t channel, int64_t inner) const {
    const int64_t outer = outer_offset(n);
    return data + (outer + channel * strides.channel + inner * strides.inner);
  }
  bool has_unit_stride(int64_t length) const { return element_stride == 1 || length == 1; }
  // Returns the span itself if its elements lie side by side, else a copy of them in `buffer`.
  const T* gather(const T* span, int64_t length, T* buffer) const {
    if (has_unit_stride(length)) return span;
    for (int64_t i = 0; i < length; ++i) buffer[i] = span[i * element_stride];
    return buffer;
  }
  void scatter(const T* buffer, int64_t length, T* span) const {
    for (int64_t i = 0; i < length; ++i) span[i * element_stride] = buffer[i];
  }
};

template <class T>
bool all_have_unit_stride(const StridedOperand<T>* operands, int operand_count) {
  for (int i = 0; i < operand_count; ++i)
    if (operands[i].element_stride != 1) return false;
  return true;
}

// A constant per channel, such as the mean, as the elements of a span need it: one number for all elements of
// a plane, or consecutive numbers of the table for the elements of a row.
template <class A, bool kIsRows>
struct ChannelConstant {
  const A* table;
  Simd<A> plane_value;
  // first_channel: the channel of a plane, or of a row's first element.
  ChannelConstant(const void* all_channels, int64_t first_channel)
      : table(static_cast<const A*>(all_channels) + first_channel),
        plane_value(Simd<A>{} + (kIsRows ? A(0) : *table)) {}
  // position: of a vector in the span (FullVector, LastVector).
  template <class Position>
  FASTVIT_FORCE_INLINE Simd<A> load(Position position) const {
    return kIsRows ? position.load(table) : plane_value;
  }
};

// A task of a reduction: the channels [first_channel, end_channel), which are a tile, in the units
// [first_unit, end_unit), which are a slice. With rows, a unit is a row. With planes, a unit is the same
// segment of the planes of all channels, at one outer index.
struct Task {
  int64_t slice, first_unit, end_unit, first_channel, end_channel;
};

// Calls run_task(task) for every task of a reduction, in parallel.
template <class RunTask>
void for_each_task(const WalkLayout& layout, const CpuPlan& plan, const RunTask& run_task) {
  torch::stable::parallel_for(0, plan.slices * plan.tiles, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slice = i / plan.tiles, tile = i % plan.tiles;
      run_task(Task{slice, plan.first_unit(slice), plan.first_unit(slice + 1),
                    layout.channels * tile / plan.tiles, layout.channels * (tile + 1) / plan.tiles});
    }
  });
}

constexpr int64_t kMinElementsPerThread = 32768;  // for fewer a thread is not worth its start

// The smallest number of segments or rows of `length` elements that a thread is started for.
inline int64_t parallel_grain(int64_t length) {
  return length > 0 && kMinElementsPerThread > length ? kMinElementsPerThread / length : 1;
}

// Whether a result of that many elements is stored past the caches, by non-temporal stores. These do not read
// the cache line first: in float32 with long spans an op takes 0.73 to 0.84 times as long as with ordinary
// stores.
template <class T>
bool is_too_large_for_cache(int64_t elements) {
  return elements * int64_t(sizeof(T)) >= kMinBytesPastCache;
}

// A kernel's body is called for a SpanSeries: `spans` spans of `length` elements in every tensor. They are
// the planes of consecutive channels, or consecutive rows, or one span, or one segment of a span.
template <class T>
struct SpanSeries {
  const T* in_data[3];                  // the first span in each tensor that is read
  T* out_data[2];                       // the first span in each tensor that is written
  int64_t in_stride[3], out_stride[2];  // from a span to the next one
  int64_t spans, length, first_channel;
  bool stores_past_cache;  // the result is stored past the caches

  // Span k of a tensor. operand: the tensor's index among those that are read, or that are written.
  const T* in_span(int operand, int64_t k) const { return in_data[operand] + k * in_stride[operand]; }
  T* out_span(int operand, int64_t k) const { return out_data[operand] + k * out_stride[operand]; }
};

// The stride from a span to the next one of a series.
inline int64_t get_span_stride(const WalkLayout& layout, const Strides& strides) {
  return layout.is_rows ? strides.outer[0] : strides.channel;
}

// A kernel's body is called by pointer, so that the walk is compiled once and not once per activation.
template <class T, class Args>
using SpanBody = void (*)(const Args& args, const SpanSeries<T>& series);

// The state of for_each_span. Args: a kernel's parameters, with a `layout` and a `plan`.
template <class T, class Args>
class SpanWalk {
  const Args& args;
  const StridedOperand<T>*const in, *const out;
  const int in_count, out_count;
  const SpanBody<T, Args> body;
  const bool needs_no_buffers;  // every span has unit stride
  const int64_t span_length;
  const int64_t spans_per_outer;  // spans at one outer index: channels (planes), or 1 (rows)
  bool stores_past_cache;
  bool joins_spans;  // a span is one segment, and its successor is at a fixed stride: several make one series

  struct Place {             // where a segment begins
    int64_t n;               // outer index
    int64_t channel, inner;  // of the first element
  };

 public:
  SpanWalk(const Args& args, const StridedOperand<T>* in, int in_count, const StridedOperand<T>* out,
           int out_count, SpanBody<T, Args> body)
      : args(args),
        in(in),
        out(out),
        in_count(in_count),
        out_count(out_count),
        body(body),
        needs_no_buffers(all_have_unit_stride(in, in_count) && all_have_unit_stride(out, out_count)),
        span_length(args.layout.is_rows ? args.layout.channels : args.layout.inner),
        spans_per_outer(args.layout.is_rows ? 1 : args.layout.channels) {
    const WalkLayout& layout = args.layout;
    // Not stored past the caches: two results, whose alignments may differ, and a result that overwrites an
    // input, since its cache lines were read already.
    stores_past_cache = needs_no_buffers && out_count == 1 && is_too_large_for_cache<T>(args.plan.numel);
    for (int i = 0; i < in_count; ++i) stores_past_cache = stores_past_cache && in[i].data != out[0].data;
    joins_spans = needs_no_buffers && args.plan.segments == 1 && (!layout.is_rows || layout.outer_dims == 1);
  }

  void run() const {
    torch::stable::parallel_for(0, args.layout.outer * spans_per_outer * args.plan.segments,
                                parallel_grain(args.plan.segment_length), [&](int64_t begin, int64_t end) {
                                  needs_no_buffers ? walk_unbuffered(begin, end) : walk_buffered(begin, end);
                                });
  }

 private:
  SpanSeries<T> make_series() const {
    SpanSeries<T> series;
    for (int i = 0; i < in_count; ++i) series.in_stride[i] = get_span_stride(args.layout, in[i].strides);
    for (int i = 0; i < out_count; ++i) series.out_stride[i] = get_span_stride(args.layout, out[i].strides);
    series.stores_past_cache = stores_past_cache;
    return series;
  }

  // Finds where segment `index` of the walk begins, and sets the sizes of the series that begins there. The
  // series is the segment and, with joins_spans, the spans after it up to `end`, while the stride is fixed.
  FASTVIT_FORCE_INLINE Place locate(int64_t index, int64_t end, SpanSeries<T>& series) const {
    const CpuPlan& plan = args.plan;
    const bool is_rows = args.layout.is_rows;
    const int64_t first = index % plan.segments * plan.segment_length;
    const int64_t span = index / plan.segments, channel = span % spans_per_outer, n = span / spans_per_outer;
    series.spans = !joins_spans ? 1 : is_rows ? end - index : minimum(end - index, spans_per_outer - channel);
    series.length = minimum(span_length - first, plan.segment_length);
    series.first_channel = is_rows ? first : channel;
    return {n, series.first_channel, is_rows ? 0 : first};
  }

  void walk_unbuffered(int64_t begin, int64_t end) const {
    SpanSeries<T> series = make_series();
    for (int64_t index = begin; index < end; index += series.spans) {
      const auto [n, channel, inner] = locate(index, end, series);
      for (int i = 0; i < in_count; ++i) series.in_data[i] = in[i].address(n, channel, inner);
      for (int i = 0; i < out_count; ++i) series.out_data[i] = out[i].address(n, channel, inner);
      body(args, series);
    }
    if (stores_past_cache) fence_non_temporal();
  }

  void walk_buffered(int64_t begin, int64_t end) const {
    T in_buffers[3][kMaxSegmentLength], out_buffers[2][kMaxSegmentLength];
    SpanSeries<T> series = make_series();
    for (int64_t index = begin; index < end; index += series.spans) {
      const auto [n, channel, inner] = locate(index, end, series);
      T* results[2];
      for (int i = 0; i < in_count; ++i)
        series.in_data[i] = in[i].gather(in[i].address(n, channel, inner), series.length, in_buffers[i]);
      for (int i = 0; i < out_count; ++i) {
        results[i] = out[i].address(n, channel, inner);
        series.out_data[i] = out[i].element_stride == 1 ? results[i] : out_buffers[i];
      }
      body(args, series);
      for (int i = 0; i < out_count; ++i)
        if (series.out_data[i] != results[i]) out[i].scatter(series.out_data[i], series.length, results[i]);
    }
  }
};

// Calls body(args, series) for all spans of the tensors `in`, which are read, and `out`, which are written,
// in the order of memory. Each thread takes a contiguous range.
template <class T, class Args>
void for_each_span(const Args& args, const StridedOperand<T>* in, int in_count, const StridedOperand<T>* out,
                   int out_count, SpanBody<T, Args> body) {
  SpanWalk<T, Args>(args, in, in_count, out, out_count, body).run();
}

// Calls function.template operator()<T>() for the storage type T of a dtype.
template <class Function>
void dispatch_storage_type(ScalarType dtype, const Function& function) {
  fastvit::dispatch_storage_type<Half, BFloat16>(dtype, function);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
