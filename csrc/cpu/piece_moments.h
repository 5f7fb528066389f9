// Mean and M2 of a run of values that is short enough for the cache, which is passed over twice: sum, then
// deviations from that mean, whose own sum corrects it.
#pragma once

#include "vector.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {

struct PieceMoments {
  double mean, m2;
};

template <class T, class A>
FASTVIT_INLINE PieceMoments moments_of(const T* x, int64_t n) {
  constexpr int L = kLanes<A>, kUnroll = 4;
  Vector<A> sum[kUnroll] = {};
  int64_t i = 0;
  for (; i + L * kUnroll <= n; i += L * kUnroll)
    for (int u = 0; u < kUnroll; ++u) sum[u] += load<A>(x + i + u * L);
  for (; i + L <= n; i += L) sum[0] += load<A>(x + i);
  const int rest = int(n - i);
  if (rest) sum[1] += load_some<A>(x + i, rest);
  const A mean = sum_lanes<A>((sum[0] + sum[1]) + (sum[2] + sum[3])) / A(n);

  prefetch(x + n, n);  // the next piece, most of the time; memory would idle during the second pass
  Vector<A> deviation[kUnroll] = {}, square[kUnroll] = {};
  const Vector<A> center = Vector<A>{} + mean;
  for (i = 0; i + L * kUnroll <= n; i += L * kUnroll)
    for (int u = 0; u < kUnroll; ++u) {
      const Vector<A> d = load<A>(x + i + u * L) - center;
      deviation[u] += d;
      square[u] += d * d;
    }
  for (; i + L <= n; i += L) {
    const Vector<A> d = load<A>(x + i) - center;
    deviation[0] += d;
    square[0] += d * d;
  }
  if (rest) {
    const Vector<A> d = first_lanes<A>(load_some<A>(x + i, rest) - center, rest);
    deviation[1] += d;
    square[1] += d * d;
  }
  const double d = sum_lanes<A>((deviation[0] + deviation[1]) + (deviation[2] + deviation[3]));
  const double s = sum_lanes<A>((square[0] + square[1]) + (square[2] + square[3]));
  const double correction = d / double(n);
  return {double(mean) + correction, s - d * correction};
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
