// Mean and M2 of runs of values in one pass: sums of the deviations from a center, whose mean corrects it,
// and of their squares.
//
// The center is the mean of the first values. If k of n values give it, the sum of squares is at most n / k
// times M2 for any values, so few digits cancel.
#pragma once

#include "sums.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {

struct PieceMoments {
  double mean, m2;
};

// fraction: 1 / count
template <class A>
FASTVIT_INLINE PieceMoments moments_about(A center, double fraction, double deviations, double squares) {
  const double correction = deviations * fraction;
  return {double(center) + correction, squares - deviations * correction};
}

// The terms of bn_stats and of layer_norm_forward.
template <class A>
FASTVIT_INLINE Terms<A> deviations(Vector<A> x, Vector<A> center) {
  const Vector<A> d = x - center;
  return {d, d * d};
}

template <class T, class A>
FASTVIT_INLINE A mean_of_first(const T* x, int64_t n) {
  constexpr int64_t kFirst = 64;
  const int64_t k = n < kFirst ? n : kFirst;
  const auto value = [&](auto at) { return Terms<A>{at.load(x), Vector<A>{}}; };
  return sum_lanes<A>(sum_plane<A, 1>(k, value).first) / A(k);
}

template <class T, class A>
FASTVIT_INLINE Terms<A> sum_deviations(const T* x, int64_t n, A center) {
  const Vector<A> centers = Vector<A>{} + center;
  return sum_plane<A, 4>(n, [&](auto at) { return deviations<A>(at.load(x), centers); });
}

template <class T, class A>
FASTVIT_INLINE PieceMoments moments_of(const T* x, int64_t n) {
  const A center = mean_of_first<T, A>(x, n);
  const Terms<A> sums = sum_deviations(x, n, center);
  return moments_about(center, 1 / double(n), sum_lanes<A>(sums.first), sum_lanes<A>(sums.second));
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
