// bn_stats: mean and M2 (sum of squared deviations) per channel.
// Memory   reads x once from memory and a second time from cache; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics each piece fits in the cache and is read twice: for the sum, then for the deviations from that
//          mean, whose sum corrects it. Pieces merge in double, in order (moments.h).
// Source   Chan, Golub, LeVeque (1979).
#include "piece_moments.h"
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

// Rows are processed in groups that stay in the cache between the two passes.
constexpr int64_t kGroupBytes = 1 << 16;

// Adds one row to sum, or its deviations from the mean and their squares.
template <bool kSecond, class T, class A>
FASTVIT_INLINE void add_row(const T* row, int64_t n, const A* mean, A* sum, A* square) {
  constexpr int L = kLanes<A>;
  for (int64_t i = 0; i < n; i += L) {
    const Vector<A> v = i + L <= n ? load<A>(row + i) : load_some<A>(row + i, int(n - i));
    const Vector<A> term = kSecond ? v - load<A>(mean + i) : v;
    store<A>(sum + i, load<A>(sum + i) + term);  // the tables are padded to whole vectors
    if (kSecond) store<A>(square + i, load<A>(square + i) + term * term);
  }
}

template <class T, class A>
struct Stats {
  static void run(const StatsParams& args) {
    const Activations<T> x(args.x, args.layout, 0);
    for_each_task(args.layout, args.partition,
                  [&](int64_t slice, int64_t first, int64_t last, int64_t c0, int64_t c1) {
                    double* mean = args.partial + slice * 2 * args.layout.C;
                    double* m2 = mean + args.layout.C;
                    for (int64_t c = c0; c < c1; ++c) mean[c] = m2[c] = 0;
                    if (args.layout.rows)
                      rows(x, first, last, c0, c1 - c0, mean + c0, m2 + c0);
                    else
                      planes(x, args, first, last, c0, c1, mean, m2);
                  });
  }

  static void planes(const Activations<T>& x, const StatsParams& args, int64_t first, int64_t last,
                     int64_t c0, int64_t c1, double* mean, double* m2) {
    T buffer[kPiece];
    const Partition& partition = args.partition;
    const int64_t before = values_before(args.layout, partition, first);
    for (int64_t begin = first, end; begin < last; begin = end) {  // the steps of one plane, for each channel
      const int64_t outer_index = begin / partition.pieces;
      end = (outer_index + 1) * partition.pieces < last ? (outer_index + 1) * partition.pieces : last;
      const int64_t outer = x.outer(outer_index);
      for (int64_t c = c0; c < c1; ++c)
        for (int64_t step = begin; step < end; ++step) {
          const int64_t s = step % partition.pieces * partition.piece;
          const int64_t n = args.layout.S - s < partition.piece ? args.layout.S - s : partition.piece;
          const double count = double(values_before(args.layout, partition, step) - before);
          const double share = double(n) / (count + double(n));
          const PieceMoments piece = moments_of<T, A>(x.read(x.at(outer, c, s), n, buffer), n);
          const double delta = piece.mean - mean[c];
          mean[c] += delta * share;
          m2[c] += piece.m2 + delta * delta * (count * share);
        }
    }
  }

  static void rows(const Activations<T>& x, int64_t first, int64_t last, int64_t c0, int64_t n, double* mean,
                   double* m2) {
    constexpr int kTable = kPiece + kLanes<A>;
    T buffer[kPiece];
    A sum[kTable], center[kTable], square[kTable];
    const int64_t fit = kGroupBytes / (n * int64_t(sizeof(T)));
    const int64_t group = fit < 8 ? 8 : fit > 256 ? 256 : fit;
    double count = 0;
    for (int64_t begin = first; begin < last; begin += group) {
      const int64_t end = begin + group < last ? begin + group : last;
      const A size = A(end - begin);
      for (int64_t i = 0; i < n + kLanes<A>; ++i) sum[i] = 0;
      pass<false>(x, begin, end, c0, n, center, sum, square, buffer);
      for (int64_t i = 0; i < n + kLanes<A>; ++i) {
        center[i] = sum[i] / size;
        sum[i] = square[i] = 0;
      }
      pass<true>(x, begin, end, c0, n, center, sum, square, buffer);
      const double share = double(size) / (count + double(size));
      for (int64_t i = 0; i < n; ++i) {
        const double d = sum[i];
        const double delta = double(center[i]) + d / double(size) - mean[i];
        mean[i] += delta * share;
        m2[i] += double(square[i]) - d * d / double(size) + delta * delta * (count * share);
      }
      count += double(size);
    }
  }

  template <bool kSecond>
  static void pass(const Activations<T>& x, int64_t begin, int64_t end, int64_t c0, int64_t n,
                   const A* center, A* sum, A* square, T* buffer) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x.read(x.at(x.outer(r), c0, 0), n, buffer);
      if (kSecond) prefetch(row + (end - begin) * n, n);  // the next group, where rows are contiguous
      add_row<kSecond>(row, n, center, sum, square);
    }
  }
};

}  // namespace

void stats(const StatsParams& args) {
  dispatch_dtype<Stats>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
