// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row, in the dtype of y.
// layer_norm_backward: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma; and for each
// column sum dy and sum dy * xhat.
// Memory   forward reads x once and writes y once; backward reads x and dy once and writes dx once. A row
//          stays in the L1 cache between the passes over it.
// Mapping  forward: threads take rows. Backward: a task is a slice of rows, which fixes the order of sums.
// Numerics moments as in bn_stats; pieces of a row merge in double. The sums of 64 rows are added in the
//          accumulation type, and these in double, in a fixed order.
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
    constexpr int L = kLanes<A>;
    int64_t i = 0;
    for (; i + L <= n; i += L)
      store<A>(y + i, (load<A>(x + i) - mean) * invstd * load<A>(gamma + i) + load<A>(beta + i));
    if (i < n) {
      const int rest = int(n - i);
      store_some<A>(y + i,
                    (load_some<A>(x + i, rest) - mean) * invstd * load_some<A>(gamma + i, rest) +
                        load_some<A>(beta + i, rest),
                    rest);
    }
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
  static constexpr int L = kLanes<A>;
  static constexpr int64_t kGroup = 64;  // rows summed in the accumulation type before they join in double

  // The sums of g and g * xhat over a row; adds dy and dy * xhat to the group's.
  template <bool kSums>
  struct Means {
    A mean, invstd;
    A *bias, *weight;
    Vector<A> g_sum[2] = {}, product_sum[2] = {};

    FASTVIT_INLINE void add(Vector<A> x, Vector<A> dy, Vector<A> gamma, int64_t i, int u) {
      const Vector<A> xhat = (x - mean) * invstd, g = dy * gamma;
      g_sum[u] += g;
      product_sum[u] += g * xhat;
      if constexpr (kSums) {  // the tables are padded to whole vectors
        store<A>(bias + i, load<A>(bias + i) + dy);
        store<A>(weight + i, load<A>(weight + i) + dy * xhat);
      }
    }
  };

  template <bool kSums>
  static void row(const T* x, const G* dy, T* dx, int64_t n, const A* gamma, A mean, A invstd, A* bias,
                  A* weight) {
    Means<kSums> means{mean, invstd, bias, weight};
    int64_t i = 0;
    for (; i + 2 * L <= n; i += 2 * L)
      for (int u = 0; u < 2; ++u) {
        const int64_t at = i + u * L;
        means.add(load<A>(x + at), load<A>(dy + at), load<A>(gamma + at), at, u);
      }
    if (i + L <= n) {
      means.add(load<A>(x + i), load<A>(dy + i), load<A>(gamma + i), i, 0);
      i += L;
    }
    const int rest = int(n - i);
    if (rest)  // lanes past the end hold dy = 0, so they add nothing
      means.add(load_some<A>(x + i, rest), load_some<A>(dy + i, rest), load_some<A>(gamma + i, rest), i, 1);
    const A a = sum_lanes<A>(means.g_sum[0] + means.g_sum[1]) / A(n);
    const A b = sum_lanes<A>(means.product_sum[0] + means.product_sum[1]) / A(n);

    const auto gradient = [&](Vector<A> x, Vector<A> dy, Vector<A> gamma) {
      return (dy * gamma - a - (x - mean) * invstd * b) * invstd;
    };
    for (i = 0; i + L <= n; i += L)
      store<A>(dx + i, gradient(load<A>(x + i), load<A>(dy + i), load<A>(gamma + i)));
    if (rest)
      store_some<A>(
          dx + i,
          gradient(load_some<A>(x + i, rest), load_some<A>(dy + i, rest), load_some<A>(gamma + i, rest)),
          rest);
  }

  static void run(const LayerNormBackwardParams& args) {
    args.group ? slices<true>(args) : slices<false>(args);
  }

  template <bool kSums>
  static void slices(const LayerNormBackwardParams& args) {
    const int64_t n = args.columns, numbers = 2 * args.stride;
    const T* x = static_cast<const T*>(args.x);
    const G* dy = static_cast<const G*>(args.dy);
    T* dx = static_cast<T*>(args.dx);
    const A* gamma = static_cast<const A*>(args.gamma);
    const A *mean = static_cast<const A*>(args.saved), *invstd = mean + args.rows;
    torch::stable::parallel_for(0, args.slices, 1, [&](int64_t first, int64_t last) {
      for (int64_t slice = first; slice < last; ++slice) {
        A* group = kSums ? static_cast<A*>(args.group) + slice * numbers : nullptr;
        double* partial = args.partial + slice * numbers;
        const int64_t end = args.rows * (slice + 1) / args.slices;
        for (int64_t r = args.rows * slice / args.slices; r < end;) {
          const int64_t until = r + kGroup < end ? r + kGroup : end;
          for (; r < until; ++r)
            row<kSums>(x + r * n, dy + r * n, dx + r * n, n, gamma, mean[r], invstd[r], group,
                       kSums ? group + args.stride : nullptr);
          for (int64_t i = 0; kSums && i < numbers; ++i) {
            partial[i] += double(group[i]);
            group[i] = 0;
          }
        }
      }
    });
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
