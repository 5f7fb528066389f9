// Two sums per channel of terms of the elements: what bn_stats and bn_reduce have in common.
//
// Sums of a plane, and of a few rows, are in registers, and of short planes and rows in tables: in the
// accumulation type, for at most kPiece elements of planes or kChunkRows rows, which the caller then adds in
// double.
#pragma once

#include "spans.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {

template <class A>
struct Terms {  // what the elements of a vector add to the two sums of their channels
  Vector<A> first, second;

  FASTVIT_INLINE void add(bool is_first, const Terms& t) {
    first = is_first ? t.first : first + t.first;
    second = is_first ? t.second : second + t.second;
  }
};

// The sums of terms(at) over the n elements of a plane, lane by lane. They are made in kParts parts, as an
// addition has to wait for the one before.
template <class A, int kParts, class F>
FASTVIT_INLINE Terms<A> sum_plane(int64_t n, const F& terms) {
  constexpr int L = kLanes<A>;
  if constexpr (kParts > 1)  // of a short plane, to add up the parts takes longer than to wait
    if (n < 2 * kParts * L) return sum_plane<A, 1>(n, terms);
  Terms<A> parts[kParts] = {};
  const auto add = [&](int part, const Terms<A>& t) {
    parts[part].first += t.first;
    parts[part].second += t.second;
  };
  int64_t i = 0;
  for (; i + kParts * L <= n; i += kParts * L)
    for (int part = 0; part < kParts; ++part) add(part, terms(Whole<A>{i + part * L}));
  for (int part = 0; part < kParts - 1; ++part)
    if (i + L <= n) {
      add(part, terms(Whole<A>{i}));
      i += L;
    }
  if (i < n) {
    const Terms<A> end = terms(End<A>{n});
    const int rest = int(n - i);
    add(kParts - 1, {last_lanes<A>(end.first, rest), last_lanes<A>(end.second, rest)});
  }
  for (int part = 1; part < kParts; ++part) add(0, parts[part]);
  return parts[0];
}

// The sums over planes, or over pieces of a plane, of a task's channels and steps, in the order of memory:
// sum(args, spans, k, is_first, sums) sets those of channels from spans.c on, or adds to them, and
// finish(k, c, sums, step, count) takes those of `count` elements per channel from `step` on. k, less than
// kTogether, is the index of the channel's sums.
constexpr int kTogether = 64;
template <class A, class T, class Args, class Sum, class Finish>
void sum_planes(const Args& args, const Operand<T>* in, int operands, const Task& task, const Sum& sum,
                const Finish& finish) {
  const auto [slice, first, last, c0, c1] = task;
  const Layout& layout = args.layout;
  const Partition& partition = args.partition;
  T buffer[3][kPiece];
  Terms<A> sums[kTogether];
  Spans<T> spans;
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
    if (partition.planes == 1) {  // each by itself
      const int64_t n = begin / partition.pieces, until = (n + 1) * partition.pieces;
      end = until < last ? until : last;
      for (int64_t c = c0; c < c1; ++c)
        for (int64_t step = begin; step < end; ++step) {
          const int64_t s = (step - n * partition.pieces) * partition.piece;
          read(n, c, s, layout.S - s < partition.piece ? layout.S - s : partition.piece, 1);
          sum(args, spans, 0, true, sums);
          finish(0, c, sums[0], step, spans.n);
        }
      continue;
    }
    end = begin + partition.planes < last ? begin + partition.planes : last;
    for (int64_t c = c0; c < c1; c += kTogether) {
      const int channels = int(c + kTogether < c1 ? kTogether : c1 - c),
                together = unit_stride ? channels : 1;
      for (int64_t n = begin; n < end; ++n)
        for (int k = 0; k < channels; k += together) {
          read(n, c + k, 0, layout.S, together);
          sum(args, spans, k, n == begin, sums);
        }
      for (int k = 0; k < channels; ++k) finish(k, c + k, sums[k], begin, (end - begin) * layout.S);
    }
  }
}

constexpr int64_t kChunkRows = 128;  // rows summed in the accumulation type; a chunk has up to 3/2 as many

// The end of a chunk that begins at row `begin`; the chunks of [begin, last) have equally many rows.
inline int64_t chunk_end(int64_t begin, int64_t last) {
  const int64_t rows = last - begin, groups = (rows + kChunkRows / 2) / kChunkRows;
  return groups > 1 ? begin + rows / groups : last;
}

// Prefetches the rows after those that are read side by side: the processor's prefetcher follows one stream
// of addresses, not several.
template <class T, int kAtOnce>
struct NextRows {
  const Operand<T>& x;
  int64_t n;
  const T* next = nullptr;

  void after(const T* row) {
    constexpr int64_t kAhead = 4096 / int64_t(sizeof(T));
    const bool side_by_side = x.layout->outer_dims == 1 && x.strides.outer[0] == n;
    next = side_by_side ? row + kAtOnce * n + kAhead : row;
  }
  template <class A>
  FASTVIT_INLINE void fetch(Whole<A> at) const {
    const char* bytes = reinterpret_cast<const char*>(next + kAtOnce * at.i);
    for (int64_t b = 0; b < kAtOnce * kLanes<A> * int64_t(sizeof(T)); b += 64)
      __builtin_prefetch(bytes + b, 0, 2);  // to L2: more can be under way than to L1
  }
  template <class A>
  FASTVIT_INLINE void fetch(End<A>) const {}
};

// The sums over chunks of rows, for up to kPiece channels. kAtOnce rows are added to a table at once, so that
// it is loaded and stored once for all of them. Sums of a few channels in registers over all rows would need
// no table, but take longer: rows are then read out of the order of memory.
template <class A, int kAtOnce>
struct RowSums {
  static constexpr int L = kLanes<A>;
  // The channels of the last vector have sums of their own, also where the vector overlaps the one before.
  alignas(64) A first[kPiece + L];
  alignas(64) A second[kPiece + L];

  // Sums rows [begin, end) of n channels: get(k, row) is called for kAtOnce rows, or for one where all rows
  // share a buffer, before terms(at, k) of these rows.
  template <class Get, class F>
  FASTVIT_INLINE void sum(int64_t n, int64_t begin, int64_t end, bool unit_stride, const Get& get,
                          const F& terms) {
    for (int64_t i = 0; i < n + L; ++i) first[i] = second[i] = 0;
    int64_t row = begin;
    if constexpr (kAtOnce > 1)
      for (; unit_stride && row + kAtOnce <= end; row += kAtOnce) {
        for (int k = 0; k < kAtOnce; ++k) get(k, row + k);
        add<kAtOnce>(n, terms);
      }
    for (; row < end; ++row) {
      get(0, row);
      add<1>(n, terms);
    }
  }

  // f(channel, first, second)
  template <class F>
  FASTVIT_INLINE void for_each_channel(int64_t n, const F& f) const {
    // The last vector begins with lanes that the one before covers too.
    const int64_t whole = n / L * L, ends = whole + L - n;
    for (int64_t c = 0; c < whole; ++c) f(c, first[c], second[c]);
    for (int64_t c = whole; c < n; ++c) f(c, first[ends + c], second[ends + c]);
  }

 private:
  template <int kRows, class F>
  FASTVIT_INLINE void add(int64_t n, const F& terms) {
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      Vector<A> a = load<A>(first + i), b = load<A>(second + i);
#pragma GCC unroll 8
      for (int k = 0; k < kRows; ++k) {
        const Terms<A> t = terms(Whole<A>{i}, k);
        a += t.first;
        b += t.second;
      }
      store<A>(first + i, a);
      store<A>(second + i, b);
    }
    for (int k = 0; i < n && k < kRows; ++k) {
      const Terms<A> t = terms(End<A>{n}, k);
      store<A>(first + i, load<A>(first + i) + t.first);
      store<A>(second + i, load<A>(second + i) + t.second);
    }
  }
};

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
