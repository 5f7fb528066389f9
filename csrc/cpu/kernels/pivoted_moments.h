// Mean and M2 of runs of values in one pass: sums of the deviations from a center, whose mean corrects it,
// and of their squares.
//
// The center is the mean of the first values. If k of n values give it, the sum of squares is at most n / k
// times M2 for any values, so few digits cancel.
#pragma once

#include "sums.h"

namespace fastvit {
namespace FASTVIT_ISA {

struct MeanM2 {
  double mean, m2;
};

// fraction: 1 / count
template <class A>
FASTVIT_HOST_DEVICE MeanM2 from_pivot_sums(A center, double fraction, double deviations, double squares) {
  const double correction = deviations * fraction;
  return {double(center) + correction, squares - deviations * correction};
}

// The terms of bn_stats and of layer_norm_forward.
template <class A>
FASTVIT_HOST_DEVICE TermPair<A> deviations(Simd<A> x, Simd<A> center) {
  const Simd<A> d = x - center;
  return {d, d * d};
}

template <class T, class A>
FASTVIT_HOST_DEVICE A choose_pivot(const T* x, int64_t n) {
  constexpr int64_t kFirst = 64;
  const int64_t k = n < kFirst ? n : kFirst;
  const auto value = [&](auto at) { return TermPair<A>{at.load(x), Simd<A>{}}; };
  return sum_lanes<A>(sum_plane<A, 1>(k, value).first) / A(k);
}

template <class T, class A>
FASTVIT_HOST_DEVICE TermPair<A> sum_deviations(const T* x, int64_t n, A center) {
  const Simd<A> centers = Simd<A>{} + center;
  return sum_plane<A, 4>(n, [&](auto at) { return deviations<A>(at.load(x), centers); });
}

template <class T, class A>
FASTVIT_HOST_DEVICE MeanM2 moments_of(const T* x, int64_t n) {
  const A center = choose_pivot<T, A>(x, n);
  const TermPair<A> sums = sum_deviations(x, n, center);
  return from_pivot_sums(center, 1 / double(n), sum_lanes<A>(sums.first), sum_lanes<A>(sums.second));
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
