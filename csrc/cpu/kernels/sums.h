// Two sums per channel of terms of the elements: what bn_stats and bn_reduce have in common.
//
// Sums of a plane, and of a few rows, are in registers, and of short planes and rows in tables: in the
// accumulation type, for at most kMaxSegment elements of planes or kChunkRows rows, which the caller then adds in
// double.
#pragma once

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {

template <class A>
struct TermPair {  // what the elements of a vector add to the two sums of their channels
  Simd<A> first, second;

  FASTVIT_HOST_DEVICE void add(bool is_first, const TermPair& t) {
    first = is_first ? t.first : first + t.first;
    second = is_first ? t.second : second + t.second;
  }
};

// The sums of terms(at) over the n elements of a plane, lane by lane. They are made in kAccumulators parts, as an
// addition has to wait for the one before.
template <class A, int kAccumulators, class F>
FASTVIT_HOST_DEVICE TermPair<A> sum_plane(int64_t n, const F& terms) {
  constexpr int L = kLanes<A>;
  if constexpr (kAccumulators > 1)  // of a short plane, to add up the parts takes longer than to wait
    if (n < 2 * kAccumulators * L) return sum_plane<A, 1>(n, terms);
  TermPair<A> parts[kAccumulators] = {};
  const auto add = [&](int part, const TermPair<A>& t) {
    parts[part].first += t.first;
    parts[part].second += t.second;
  };
  int64_t i = 0;
  for (; i + kAccumulators * L <= n; i += kAccumulators * L)
    for (int part = 0; part < kAccumulators; ++part) add(part, terms(FullVector<A>{i + part * L}));
  for (int part = 0; part < kAccumulators - 1; ++part)
    if (i + L <= n) {
      add(part, terms(FullVector<A>{i}));
      i += L;
    }
  if (i < n) {
    const TermPair<A> end = terms(LastVector<A>{n});
    const int rest = int(n - i);
    add(kAccumulators - 1, {zero_all_but_last<A>(end.first, rest), zero_all_but_last<A>(end.second, rest)});
  }
  for (int part = 1; part < kAccumulators; ++part) add(0, parts[part]);
  return parts[0];
}

// The sums over planes, or over pieces of a plane, of a task's channels and steps, in the order of memory:
// sum(args, spans, k, is_first, sums) sets those of channels from spans.c on, or adds to them, and
// finish(k, c, sums, step, count) takes those of `count` elements per channel from `step` on. k, less than
// kMaxChannelsAtOnce, is the index of the channel's sums.
constexpr int kMaxChannelsAtOnce = 64;
template <class A, class T, class Args, class Sum, class Finish>
void sum_planes(const Args& args, const StridedOperand<T>* in, int operands, const Task& task, const Sum& sum,
                const Finish& finish) {
  const auto [slice, first, last, c0, c1] = task;
  const WalkLayout& layout = args.layout;
  const CpuPlan& plan = args.plan;
  T buffer[3][kMaxSegment];
  TermPair<A> sums[kMaxChannelsAtOnce];
  SpanGroup<T> spans;
  bool unit_stride = true;
  for (int i = 0; i < operands; ++i) {
    unit_stride = unit_stride && in[i].stride == 1;
    spans.from_stride[i] = in[i].strides.channel;
  }
  const auto read = [&](int64_t n, int64_t c, int64_t s, int64_t length, int64_t count) {
    spans.n = length;
    spans.c = c;
    spans.count = count;
    for (int i = 0; i < operands; ++i) {
      T* const at = in[i].at(in[i].outer(n), c, s);
      spans.from[i] = unit_stride ? at : in[i].read(at, length, buffer[i]);
    }
  };
  for (int64_t begin = first, end; begin < last; begin = end) {
    if (plan.planes_at_once == 1) {  // each by itself
      const int64_t n = begin / plan.segments, until = (n + 1) * plan.segments;
      end = until < last ? until : last;
      for (int64_t c = c0; c < c1; ++c)
        for (int64_t step = begin; step < end; ++step) {
          const int64_t s = (step - n * plan.segments) * plan.segment_length;
          read(n, c, s, layout.inner - s < plan.segment_length ? layout.inner - s : plan.segment_length, 1);
          sum(args, spans, 0, true, sums);
          finish(0, c, sums[0], step, spans.n);
        }
      continue;
    }
    end = begin + plan.planes_at_once < last ? begin + plan.planes_at_once : last;
    for (int64_t c = c0; c < c1; c += kMaxChannelsAtOnce) {
      const int channels = int(c + kMaxChannelsAtOnce < c1 ? kMaxChannelsAtOnce : c1 - c),
                together = unit_stride ? channels : 1;
      for (int64_t n = begin; n < end; ++n)
        for (int k = 0; k < channels; k += together) {
          read(n, c + k, 0, layout.inner, together);
          sum(args, spans, k, n == begin, sums);
        }
      for (int k = 0; k < channels; ++k) finish(k, c + k, sums[k], begin, (end - begin) * layout.inner);
    }
  }
}

constexpr int64_t kChunkRows = 128;  // rows summed in the accumulation type; a chunk has up to 3/2 as many

// The end of a chunk that begins at row `begin`; the chunks of [begin, last) have equally many rows.
inline int64_t chunk_end(int64_t begin, int64_t last) {
  const int64_t rows = last - begin, groups = (rows + kChunkRows / 2) / kChunkRows;
  return groups > 1 ? begin + rows / groups : last;
}

// Prefetches the rows after those that are read side by side: the processor's prefetcher follows one store_non_temporal
// of addresses, not several.
template <class T, int kRowsAtOnce>
struct RowPrefetcher {
  const StridedOperand<T>& x;
  int64_t n;
  const T* next = nullptr;

  void after(const T* row) {
    constexpr int64_t kAhead = 4096 / int64_t(sizeof(T));
    const bool side_by_side = x.layout->outer_dims == 1 && x.strides.outer[0] == n;
    next = side_by_side ? row + kRowsAtOnce * n + kAhead : row;
  }
  template <class A>
  FASTVIT_HOST_DEVICE void fetch(FullVector<A> at) const {
    const char* bytes = reinterpret_cast<const char*>(next + kRowsAtOnce * at.i);
    for (int64_t b = 0; b < kRowsAtOnce * kLanes<A> * int64_t(sizeof(T)); b += 64)
      __builtin_prefetch(bytes + b, 0, 2);  // to L2: more can be under way than to L1
  }
  template <class A>
  FASTVIT_HOST_DEVICE void fetch(LastVector<A>) const {}
};

// The sums over chunks of rows, for up to kMaxSegment channels. kRowsAtOnce rows are added to a table at once, so that
// it is loaded and stored once for all of them. Sums of a few channels in registers over all rows would need
// no table, but take longer: rows are then read out of the order of memory.
template <class A, int kRowsAtOnce>
struct RowSums {
  static constexpr int L = kLanes<A>;
  // The channels of the last vector have sums of their own, also where the vector overlaps the one before.
  alignas(64) A first[kMaxSegment + L];
  alignas(64) A second[kMaxSegment + L];

  // Sums rows [begin, end) of n channels: get(k, row) is called for kRowsAtOnce rows, or for one where all rows
  // share a buffer, before terms(at, k) of these rows.
  template <class Get, class F>
  FASTVIT_HOST_DEVICE void sum(int64_t n, int64_t begin, int64_t end, bool unit_stride, const Get& get,
                               const F& terms) {
    for (int64_t i = 0; i < n + L; ++i) first[i] = second[i] = 0;
    int64_t row = begin;
    if constexpr (kRowsAtOnce > 1)
      for (; unit_stride && row + kRowsAtOnce <= end; row += kRowsAtOnce) {
        for (int k = 0; k < kRowsAtOnce; ++k) get(k, row + k);
        add<kRowsAtOnce>(n, terms);
      }
    for (; row < end; ++row) {
      get(0, row);
      add<1>(n, terms);
    }
  }

  // f(channel, first, second)
  template <class F>
  FASTVIT_HOST_DEVICE void for_each_channel(int64_t n, const F& f) const {
    // The last vector begins with lanes that the one before covers too.
    const int64_t whole = n / L * L, ends = whole + L - n;
    for (int64_t c = 0; c < whole; ++c) f(c, first[c], second[c]);
    for (int64_t c = whole; c < n; ++c) f(c, first[ends + c], second[ends + c]);
  }

 private:
  template <int kRows, class F>
  FASTVIT_HOST_DEVICE void add(int64_t n, const F& terms) {
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      Simd<A> a = load<A>(first + i), b = load<A>(second + i);
#pragma GCC unroll 8
      for (int k = 0; k < kRows; ++k) {
        const TermPair<A> t = terms(FullVector<A>{i}, k);
        a += t.first;
        b += t.second;
      }
      store<A>(first + i, a);
      store<A>(second + i, b);
    }
    for (int k = 0; i < n && k < kRows; ++k) {
      const TermPair<A> t = terms(LastVector<A>{n}, k);
      store<A>(first + i, load<A>(first + i) + t.first);
      store<A>(second + i, load<A>(second + i) + t.second);
    }
  }
};

}  // namespace FASTVIT_ISA
}  // namespace fastvit
