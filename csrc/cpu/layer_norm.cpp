// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row, in the dtype of y.
// layer_norm_backward: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma; and for each
// column sum dy and sum dy * xhat.
// Memory   forward reads x once and writes y once; backward reads x and dy once and writes dx once. A row
//          stays in the L1 cache between the passes over it, and some rows in L2 for the columns' sums.
// Mapping  forward: threads take rows. Backward: a task is a slice of rows, which fixes the order of sums.
// Numerics moments as in bn_stats; pieces of a row merge in double. The columns' sums of 32 rows are in
//          the accumulation type, and these are added in double, in a fixed order.
// Source   Ba, Kiros, Hinton, arXiv:1607.06450; moments: Chan, Golub, LeVeque (1979).
#include <cmath>

#include "../moments.h"
#include "piece_moments.h"
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

// T: of x and dx. G: of y and dy. A: of the arithmetic.
template <class T, class G, class A>
struct Forward {
  static void row(const T* x, G* y, int64_t n, const A* gamma, const A* beta, A mean, A invstd) {
    for_each_vector<A>(
        n, [&](auto at) { return (at.load(x) - mean) * invstd * at.load(gamma) + at.load(beta); },
        [&](auto at, Vector<A> result) { at.store(y, result); });
  }

  static void run(const LayerNormForwardParams& args) {
    const int64_t n = args.columns;
    const T* x = static_cast<const T*>(args.x);
    G* y = static_cast<G*>(args.y);
    const A *gamma = static_cast<const A*>(args.gamma), *beta = static_cast<const A*>(args.beta);
    A *mean = static_cast<A*>(args.saved), *invstd = mean + args.rows;
    torch::stable::parallel_for(0, args.rows, grain_of(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        Moments<double> all;
        for (int64_t at = 0; at < n; at += kPiece) {
          const int64_t length = n - at < kPiece ? n - at : kPiece;
          const PieceMoments piece = moments_of<T, A>(x + r * n + at, length);
          all.merge(double(length), piece.mean, piece.m2);
        }
        mean[r] = A(all.mean);
        invstd[r] = A(1 / std::sqrt(all.m2 / double(n) + args.eps));
        row(x + r * n, y + r * n, n, gamma, beta, mean[r], invstd[r]);
      }
    });
  }
};

template <class T, class G, class A>
struct Backward {
  static constexpr int64_t kTogether = 32;  // rows that stay in the L2 cache until their columns are summed

  static void row(const T* x, const G* dy, T* dx, int64_t n, const A* gamma, A mean, A invstd) {
    const auto xhat = [&](auto at) -> Vector<A> { return (at.load(x) - mean) * invstd; };
    const Terms<A> sums = sum_plane<A, 2>(n, [&](auto at) {
      const Vector<A> g = at.load(dy) * at.load(gamma);
      return Terms<A>{g, g * xhat(at)};
    });
    const A a = sum_lanes<A>(sums.first) / A(n), b = sum_lanes<A>(sums.second) / A(n);
    for_each_vector<A>(
        n, [&](auto at) -> Vector<A> { return (at.load(dy) * at.load(gamma) - a - xhat(at) * b) * invstd; },
        [&](auto at, Vector<A> result) { at.store(dx, result); });
  }

  static void run(const LayerNormBackwardParams& args) {
    const int64_t n = args.columns;
    const T* x = static_cast<const T*>(args.x);
    const G* dy = static_cast<const G*>(args.dy);
    T* dx = static_cast<T*>(args.dx);
    const A* gamma = static_cast<const A*>(args.gamma);
    const A *mean = static_cast<const A*>(args.saved), *invstd = mean + args.rows;
    torch::stable::parallel_for(0, args.slices, 1, [&](int64_t first, int64_t last) {
      for (int64_t slice = first; slice < last; ++slice) {
        const int64_t end = args.rows * (slice + 1) / args.slices;
        for (int64_t r = args.rows * slice / args.slices, until; r < end; r = until) {
          until = r + kTogether < end ? r + kTogether : end;
          for (int64_t i = r; i < until; ++i)
            row(x + i * n, dy + i * n, dx + i * n, n, gamma, mean[i], invstd[i]);
          if (args.partial) add_columns(x, dy, mean, invstd, n, r, until, args.partial + slice * 2 * n);
        }
      }
    });
  }

  // Adds sum dy and sum dy * xhat of rows [begin, end) to total[2][n].
  static void add_columns(const T* x, const G* dy, const A* mean, const A* invstd, int64_t n, int64_t begin,
                          int64_t end, double* total) {
    constexpr int kAtOnce = 4;
    RowSums<A, kAtOnce> sums;
    int64_t row[kAtOnce];
    for (int64_t c0 = 0; c0 < n; c0 += kPiece) {
      sums.sum(
          n - c0 < kPiece ? n - c0 : kPiece, begin, end, true, [&](int slot, int64_t r) { row[slot] = r; },
          [&](auto at, int slot) {
            const int64_t r = row[slot];
            const Vector<A> g = at.load(dy + r * n + c0);
            return Terms<A>{g, g * ((at.load(x + r * n + c0) - mean[r]) * invstd[r])};
          });
      sums.for_each_channel(n - c0 < kPiece ? n - c0 : kPiece, [&](int64_t c, A first, A second) {
        total[c0 + c] += double(first);
        total[n + c0 + c] += double(second);
      });
    }
  }
};

// Calls Kernel<T, G, A>::run(args) for the dtypes in args.
template <template <class, class, class> class Kernel, class Args>
void dispatch_dtypes(const Args& args) {
  const bool narrows = args.output_dtype != args.dtype;
  switch (args.dtype) {
    case ScalarType::Float:
      if (!narrows) return Kernel<float, float, float>::run(args);
      if (args.output_dtype == ScalarType::BFloat16) return Kernel<float, BFloat16, float>::run(args);
      return Kernel<float, Half, float>::run(args);
    case ScalarType::Double:
      return Kernel<double, double, double>::run(args);
    case ScalarType::BFloat16:
      return Kernel<BFloat16, BFloat16, float>::run(args);
    default:
      return Kernel<Half, Half, float>::run(args);
  }
}

}  // namespace

void layer_norm_forward(const LayerNormForwardParams& args) {
  dispatch_dtypes<Forward>(args);
}

void layer_norm_backward(const LayerNormBackwardParams& args) {
  dispatch_dtypes<Backward>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
