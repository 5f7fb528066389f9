// Mean and M2 (the sum of squared deviations from the mean) of a span's values, in one pass after the pivot.
//
// The deviations from a pivot and their squares are summed. The mean is the pivot plus the mean deviation; M2
// is the sum of squares minus (sum of deviations * mean deviation). The pivot is the mean of the first
// values: if it is the mean of k of n values, the sum of the squared deviations from it is at most n / k
// times M2 for any data, so few digits cancel.
// T: storage type of the values. A: accumulation type.
#pragma once

#include "sums.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles the kernels once per instruction set, each in its own namespace

struct MeanM2 {
  double mean, m2;
};

// Computes the moments of n values from the sum of their deviations from the pivot and the sum of the squared
// deviations. inverse_count: 1 / n.
template <class A>
FASTVIT_FORCE_INLINE MeanM2 moments_from_pivot_sums(A pivot, double inverse_count, double deviation_sum,
                                                    double square_sum) {
  const double mean_deviation = deviation_sum * inverse_count;
  return {double(pivot) + mean_deviation, square_sum - deviation_sum * mean_deviation};
}

template <class A>
FASTVIT_FORCE_INLINE TermPair<A> compute_deviation_terms(Simd<A> x, Simd<A> pivot) {
  const Simd<A> deviation = x - pivot;
  return {deviation, deviation * deviation};
}

template <class T, class A>
FASTVIT_FORCE_INLINE A choose_pivot(const T* x, int64_t length) {
  constexpr int64_t kMaxPivotValues = 64;
  const int64_t count = minimum(length, kMaxPivotValues);
  const auto load_value = [&](auto position) { return TermPair<A>{position.load(x), Simd<A>{}}; };
  return sum_lanes<A>(sum_span<A, /*kAccumulators=*/1>(count, load_value).first) / A(count);
}

template <class T, class A>
FASTVIT_FORCE_INLINE TermPair<A> sum_deviations(const T* x, int64_t length, A pivot) {
  const Simd<A> pivots = Simd<A>{} + pivot;
  return sum_span<A, /*kAccumulators=*/4>(
      length, [&](auto position) { return compute_deviation_terms<A>(position.load(x), pivots); });
}

template <class T, class A>
FASTVIT_FORCE_INLINE MeanM2 compute_moments(const T* x, int64_t length) {
  const A pivot = choose_pivot<T, A>(x, length);
  const TermPair<A> sums = sum_deviations(x, length, pivot);
  return moments_from_pivot_sums(pivot, 1 / double(length), sum_lanes<A>(sums.first),
                                 sum_lanes<A>(sums.second));
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
