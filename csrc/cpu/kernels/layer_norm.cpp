// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row, in the dtype of y.
// layer_norm_backward: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma; and for each
// column sum dy and sum dy * xhat.
// Memory   forward reads x once and writes y once; backward reads x and dy once and writes dx once. A row
//          stays in the L1 cache between the passes over it.
// Mapping  forward: threads take rows. Backward: a task is a slice of rows, which fixes the order of sums.
// Numerics moments as in bn_stats; pieces of a row merge in double. The columns' sums of 128 rows are in
//          the accumulation type, and these are added in double, in a fixed order.
// Source   Ba, Kiros, Hinton, arXiv:1607.06450; moments: Chan, Golub, LeVeque (1979).
#include <cmath>

#include "../../moments.h"
#include "pivoted_moments.h"
#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

// T: of x and dx. G: of y and dy. A: of the arithmetic.
template <class T, class Y, class A>
struct Forward {
  struct Row {
    const T* x;
    Y* y;
    A mean, invstd;
  };
  static void write(const Row& row, int64_t n, NonTemporalRange streaming, const A* gamma, const A* beta) {
    const T* x = row.x;
    Y* y = row.y;
    const A mean = row.mean, invstd = row.invstd;
    for_each_vector<A>(
        n, streaming, [&](auto at) { return (at.load(x) - mean) * invstd * at.load(gamma) + at.load(beta); },
        [&](auto at, Simd<A> result) { at.store(y, result); });
  }

  static void run(const CpuLayerNormForwardParams& args) {
    const int64_t n = args.columns;
    const T* x = static_cast<const T*>(args.x);
    Y* y = static_cast<Y*>(args.y);
    const A *gamma = static_cast<const A*>(args.gamma), *beta = static_cast<const A*>(args.beta);
    A *mean = static_cast<A*>(args.saved), *invstd = mean + args.rows;
    const bool streams = bypasses_cache<Y>(args.rows * n);
    torch::stable::parallel_for(0, args.rows, parallel_grain(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        double center = 0, m2 = 0;
        for (int64_t at = 0; at < n; at += kMaxSegment) {
          const int64_t length = n - at < kMaxSegment ? n - at : kMaxSegment;
          const MeanM2 piece = moments_of<T, A>(x + r * n + at, length);
          MergeWeights::of_counts(double(at), double(length)).merge(center, m2, piece.mean, piece.m2);
        }
        mean[r] = A(center);
        invstd[r] = A(1 / std::sqrt(m2 / double(n) + args.eps));
        write({x + r * n, y + r * n, mean[r], invstd[r]}, n,
              NonTemporalRange(streams, y + r * n, n, kLanes<A>), gamma, beta);
      }
      fence_non_temporal();
    });
  }
};

template <class T, class Y, class A>
struct Backward {
  static constexpr int L = kLanes<A>;

  // Where a vector is added to the columns' sums. The last has sums of its own, also where it overlaps the
  // one before.
  static int64_t column(FullVector<A> at) { return at.i; }
  static int64_t column(LastVector<A> at) { return at.n / L * L; }
  static FASTVIT_HOST_DEVICE void add(A* sums, Simd<A> terms) { store<A>(sums, load<A>(sums) + terms); }

  struct Row {
    const T* x;
    const Y* dy;
    T* dx;
    A mean, invstd;
  };
  // Adds dy to bias and dy * xhat to weight.
  template <bool kColumns>
  static void write(const Row& row, int64_t n, NonTemporalRange streaming, const A* gamma, A* bias,
                    A* weight) {
    const T* x = row.x;
    const Y* dy = row.dy;
    T* dx = row.dx;
    const A mean = row.mean, invstd = row.invstd;
    const auto xhat = [&](auto at) -> Simd<A> { return (at.load(x) - mean) * invstd; };
    const TermPair<A> sums = sum_plane<A, 2>(n, [&](auto at) {
      const Simd<A> y = at.load(dy), h = xhat(at), g = y * at.load(gamma);
      if constexpr (kColumns) {
        add(bias + column(at), y);
        add(weight + column(at), y * h);
      }
      return TermPair<A>{g, g * h};
    });
    const A a = sum_lanes<A>(sums.first) / A(n), b = sum_lanes<A>(sums.second) / A(n);
    for_each_vector<A>(
        n, streaming,
        [&](auto at) -> Simd<A> { return (at.load(dy) * at.load(gamma) - a - xhat(at) * b) * invstd; },
        [&](auto at, Simd<A> result) { at.store(dx, result); });
  }

  static void run(const CpuLayerNormBackwardParams& args) {
    args.sums ? slices<true>(args) : slices<false>(args);
  }

  template <bool kColumns>
  static void slices(const CpuLayerNormBackwardParams& args) {
    const int64_t n = args.columns;
    const T* x = static_cast<const T*>(args.x);
    const Y* dy = static_cast<const Y*>(args.dy);
    T* dx = static_cast<T*>(args.dx);
    const A* gamma = static_cast<const A*>(args.gamma);
    const A *mean = static_cast<const A*>(args.saved), *invstd = mean + args.rows;
    const bool streams = bypasses_cache<T>(args.rows * n);
    torch::stable::parallel_for(0, args.slices, 1, [&](int64_t first, int64_t last) {
      for (int64_t slice = first; slice < last; ++slice) {
        A* bias = kColumns ? static_cast<A*>(args.chunk_sums) + slice * 2 * args.stride : nullptr;
        A* weight = kColumns ? bias + args.stride : nullptr;
        const int64_t end = args.rows * (slice + 1) / args.slices;
        for (int64_t r = args.rows * slice / args.slices; r < end;) {
          const int64_t until = r + kChunkRows < end ? r + kChunkRows : end;
          for (; r < until; ++r)
            write<kColumns>({x + r * n, dy + r * n, dx + r * n, mean[r], invstd[r]}, n,
                            NonTemporalRange(streams, dx + r * n, n, L), gamma, bias, weight);
          if constexpr (kColumns) {
            double* partial = args.partial + slice * 2 * n;
            flush(bias, n, partial);
            flush(weight, n, partial + n);
          }
        }
      }
      fence_non_temporal();
    });
  }

  // Adds the sums of a chunk of rows to total[n], and sets them to 0.
  static void flush(A* sums, int64_t n, double* total) {
    const int64_t whole = n / L * L, padded = whole < n ? whole + L : n;
    for (int64_t c = 0; c < whole; ++c) total[c] += double(sums[c]);
    for (int64_t c = whole; c < n; ++c) total[c] += double(sums[c + padded - n]);
    for (int64_t c = 0; c < padded; ++c) sums[c] = 0;
  }
};

}  // namespace

void layer_norm_forward(const CpuLayerNormForwardParams& args) {
  dispatch_layer_norm_types<Half, BFloat16>(
      args.dtype, args.output_dtype, [&]<class T, class Y>() { Forward<T, Y, Accumulation<T>>::run(args); });
}

void layer_norm_backward(const CpuLayerNormBackwardParams& args) {
  dispatch_layer_norm_types<Half, BFloat16>(
      args.dtype, args.output_dtype, [&]<class T, class Y>() { Backward<T, Y, Accumulation<T>>::run(args); });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
