// For each channel, sums two numbers (terms) that are computed from each element: the common part of bn_stats
// and bn_reduce.
//
// With planes (NCHW), a channel's elements lie side by side. With rows (channels_last, tokens), the channels
// lie side by side. At most kMaxSegmentLength elements of a channel's planes, or a chunk of about kChunkRows
// rows, are summed in the accumulation type A, lane by lane of a SIMD register. The caller adds these results
// in double.
// T: storage type of the tensors.
#pragma once

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles the kernels once per instruction set, each in its own namespace

// Either the two terms of each element of a vector, or the two sums to which such terms are added lane by
// lane. bn_stats sums (d, d * d) with d = x - pivot; bn_reduce sums (dv, dv * second_factor), where
// second_factor is x - mean or xhat.
template <class A>
struct TermPair {
  Simd<A> first, second;

  // Adds the terms to the sums. With is_first the sums are set to the terms.
  FASTVIT_FORCE_INLINE void add(bool is_first, const TermPair& terms) {
    first = is_first ? terms.first : first + terms.first;
    second = is_first ? terms.second : second + terms.second;
  }
};

// Sums compute_terms(position) over the vectors of a span. kAccumulators independent sums hide the latency of
// an addition.
template <class A, int kAccumulators, class ComputeTerms>
FASTVIT_FORCE_INLINE TermPair<A> sum_span(int64_t length, const ComputeTerms& compute_terms) {
  constexpr int L = kLanes<A>;
  if constexpr (kAccumulators > 1)
    // For a short span, adding up the accumulators takes longer than the latency that they hide.
    if (length < 2 * kAccumulators * L) return sum_span<A, 1>(length, compute_terms);
  TermPair<A> sums[kAccumulators] = {};
  const auto add = [&](int k, const TermPair<A>& terms) {
    sums[k].first += terms.first;
    sums[k].second += terms.second;
  };
  int64_t i = 0;
  for (; i + kAccumulators * L <= length; i += kAccumulators * L)
    for (int k = 0; k < kAccumulators; ++k) add(k, compute_terms(FullVector<A>{i + k * L}));
  for (int k = 0; k < kAccumulators - 1; ++k)
    if (i + L <= length) {
      add(k, compute_terms(FullVector<A>{i}));
      i += L;
    }
  if (i < length) {  // the last vector begins with lanes that were summed already, or with zeros
    const TermPair<A> last = compute_terms(LastVector<A>{length});
    const int rest = int(length - i);
    add(kAccumulators - 1, {zero_all_but_last<A>(last.first, rest), zero_all_but_last<A>(last.second, rest)});
  }
  for (int k = 1; k < kAccumulators; ++k) add(0, sums[k]);
  return sums[0];
}

// Sums the planes of a task (a range of channels and of units), in the order of memory. A segment is a plane
// or a part of it; a unit is the same segment of the planes of all channels, at one outer index.
// Long planes are summed segment by segment. If planes are short, plan.planes_at_once planes of a channel are
// summed into one result, for up to kMaxChannelsAtOnce channels in the same pass over memory.
//
// sum(args, series, first_sum, is_first, sums) adds the terms of the series' spans to sums[first_sum],
// sums[first_sum + 1], ..., one for each channel. With is_first these sums are not yet set, and it sets them.
// finish(k, channel, sums[k], unit, count) takes a complete result, of `count` elements from `unit` on.
//
// Kept in one function: with the two loops in functions of their own, bn_stats of small planes takes up to a
// seventh longer in float32.
constexpr int kMaxChannelsAtOnce = 64;
template <class A, class T, class Args, class Sum, class Finish>
void sum_planes(const Args& args, const StridedOperand<T>* operands, int operand_count, const Task& task,
                const Sum& sum, const Finish& finish) {
  const auto [slice, first_unit, end_unit, first_channel, end_channel] = task;
  const WalkLayout& layout = args.layout;
  const CpuPlan& plan = args.plan;
  T buffers[3][kMaxSegmentLength];
  TermPair<A> sums[kMaxChannelsAtOnce];
  SpanSeries<T> series;
  bool has_unit_strides = true;
  for (int i = 0; i < operand_count; ++i) {
    has_unit_strides = has_unit_strides && operands[i].element_stride == 1;
    series.in_stride[i] = operands[i].strides.channel;
  }
  // Sets the series to `length` elements, from element `inner` on, of the planes of `spans` channels, at
  // outer index n.
  const auto set_series = [&](int64_t n, int64_t channel, int64_t inner, int64_t length, int64_t spans) {
    series.length = length;
    series.first_channel = channel;
    series.spans = spans;
    for (int i = 0; i < operand_count; ++i) {
      T* const span = operands[i].address(n, channel, inner);
      series.in_data[i] = has_unit_strides ? span : operands[i].gather(span, length, buffers[i]);
    }
  };
  for (int64_t begin = first_unit, end; begin < end_unit; begin = end) {
    if (plan.planes_at_once == 1) {  // long planes
      const int64_t n = begin / plan.segments;
      end = minimum((n + 1) * plan.segments, end_unit);
      for (int64_t c = first_channel; c < end_channel; ++c)
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t inner = (unit - n * plan.segments) * plan.segment_length;
          set_series(n, c, inner, minimum(layout.inner - inner, plan.segment_length), /*spans=*/1);
          sum(args, series, /*first_sum=*/0, /*is_first=*/true, sums);
          finish(/*k=*/0, c, sums[0], unit, series.length);
        }
      continue;
    }
    // Short planes, of one segment each, so that a unit is an outer index.
    end = minimum(begin + plan.planes_at_once, end_unit);
    for (int64_t c = first_channel; c < end_channel; c += kMaxChannelsAtOnce) {
      const int channels = int(c + kMaxChannelsAtOnce < end_channel ? kMaxChannelsAtOnce : end_channel - c),
                spans = has_unit_strides ? channels : 1;
      for (int64_t n = begin; n < end; ++n)
        for (int k = 0; k < channels; k += spans) {
          set_series(n, c + k, /*inner=*/0, layout.inner, spans);
          sum(args, series, k, /*is_first=*/n == begin, sums);
        }
      for (int k = 0; k < channels; ++k) finish(k, c + k, sums[k], begin, (end - begin) * layout.inner);
    }
  }
}

// The nominal number of rows of a chunk, which are summed in the accumulation type. A chunk has less than 3/2
// of it.
constexpr int64_t kChunkRows = 128;

// The end of the chunk that begins at row `begin`. The chunks of [begin, end) are about equally large.
inline int64_t find_chunk_end(int64_t begin, int64_t end) {
  const int64_t rows = end - begin, chunks = (rows + kChunkRows / 2) / kChunkRows;
  return chunks > 1 ? begin + rows / chunks : end;
}

// Prefetches rows: kRowsAtOnce rows are read at the same time, but the processor's prefetcher follows only
// one stream of addresses.
template <class T, int kRowsAtOnce>
struct RowPrefetcher {
  const StridedOperand<T>& operand;
  int64_t length;           // of a row
  const T* next = nullptr;  // what is prefetched while the rows' first vectors are summed

  // row: the first of the rows that are summed now. If rows lie side by side, `next` is 4 KiB after
  // the end of these rows. Otherwise it is `row`, and prefetching gains nothing.
  void set_row(const T* row) {
    constexpr int64_t kElementsAhead = 4096 / int64_t(sizeof(T));
    const bool side_by_side = operand.layout->outer_dims == 1 && operand.strides.outer[0] == length;
    next = side_by_side ? row + kRowsAtOnce * length + kElementsAhead : row;
  }
  template <class A>
  FASTVIT_FORCE_INLINE void prefetch(FullVector<A> position) const {
    const char* bytes = reinterpret_cast<const char*>(next + kRowsAtOnce * position.i);
    for (int64_t b = 0; b < kRowsAtOnce * kLanes<A> * int64_t(sizeof(T)); b += 64)
      __builtin_prefetch(bytes + b, /*rw=*/0,
                         /*locality=*/2);  // into L2, which allows more misses at a time than L1
  }
  template <class A>
  FASTVIT_FORCE_INLINE void prefetch(LastVector<A>) const {}
};

// The two sums of up to kMaxSegmentLength channels over a chunk of rows. kRowsAtOnce rows are added to the
// table of sums at once, so that the table is loaded and stored once for all of them. Summing only a few
// channels at a time over all rows would keep the sums in registers, without a table, but would jump from row
// to row in memory, which is slower.
template <class A, int kRowsAtOnce>
struct RowSums {
  static constexpr int L = kLanes<A>;
  // The last vector of a row may overlap the one before, and has L sums of its own.
  alignas(64) A first_sums[kMaxSegmentLength + L];
  alignas(64) A second_sums[kMaxSegmentLength + L];

  // Sums rows [begin, end) of `length` channels: calls load_row(k, row) for kRowsAtOnce rows, then
  // compute_terms(position, k) for the vectors of each. Without a unit stride it takes rows one by one, as
  // load_row copies each to the same buffer.
  template <class LoadRow, class ComputeTerms>
  FASTVIT_FORCE_INLINE void sum(int64_t length, int64_t begin, int64_t end, bool has_unit_stride,
                                const LoadRow& load_row, const ComputeTerms& compute_terms) {
    for (int64_t i = 0; i < length + L; ++i) first_sums[i] = second_sums[i] = 0;
    int64_t row = begin;
    if constexpr (kRowsAtOnce > 1)
      for (; has_unit_stride && row + kRowsAtOnce <= end; row += kRowsAtOnce) {
        for (int k = 0; k < kRowsAtOnce; ++k) load_row(k, row + k);
        add_rows<kRowsAtOnce>(length, compute_terms);
      }
    for (; row < end; ++row) {
      load_row(0, row);
      add_rows<1>(length, compute_terms);
    }
  }

  // Calls take(channel, first_sum, second_sum) for the `length` channels.
  template <class Take>
  FASTVIT_FORCE_INLINE void for_each_channel(int64_t length, const Take& take) const {
    // The last vector begins with lanes that the vector before it has too.
    const int64_t whole = length / L * L, overlap = whole + L - length;
    for (int64_t c = 0; c < whole; ++c) take(c, first_sums[c], second_sums[c]);
    for (int64_t c = whole; c < length; ++c) take(c, first_sums[overlap + c], second_sums[overlap + c]);
  }

 private:
  template <int kRows, class ComputeTerms>
  FASTVIT_FORCE_INLINE void add_rows(int64_t length, const ComputeTerms& compute_terms) {
    int64_t i = 0;
    for (; i + L <= length; i += L) {
      Simd<A> first = load<A>(first_sums + i), second = load<A>(second_sums + i);
#pragma GCC unroll 8
      for (int k = 0; k < kRows; ++k) {
        const TermPair<A> terms = compute_terms(FullVector<A>{i}, k);
        first += terms.first;
        second += terms.second;
      }
      store<A>(first_sums + i, first);
      store<A>(second_sums + i, second);
    }
    for (int k = 0; i < length && k < kRows; ++k) {  // only if a row does not end with a whole vector
      const TermPair<A> terms = compute_terms(LastVector<A>{length}, k);
      store<A>(first_sums + i, load<A>(first_sums + i) + terms.first);
      store<A>(second_sums + i, load<A>(second_sums + i) + terms.second);
    }
  }
};

}  // namespace FASTVIT_ISA
}  // namespace fastvit
