// fast_exp, fast_expm1 and fast_log1p for GCC/Clang vectors of float or double, of any width.
//
// exp(v) = 2^n exp(r), with n the integer nearest v / ln 2, so |r| <= ln 2 / 2. n ln 2 is subtracted in two
// parts, the first of which is exact (Cody, Waite, "Software Manual for the Elementary Functions", 1980,
// chapter 6). exp(r) is its Taylor series with a remainder below half a unit in the last place: degree 7 for
// float, 13 for double. Errors are 1 to 2 units in the last place.
#pragma once

#include <cmath>
#include <type_traits>

#include "host_device.h"

namespace fastvit {

template <class S>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 0x1.8p23f;             // adding it rounds to an integer, in the low bits
  static constexpr float kLowest = -104, kHighest = 89;  // exp is 0 below, infinite above
  static constexpr float kSaturated = -30;               // below it expm1 is -1
  static constexpr int kFraction = 23, kBias = 127;
};
template <>
struct ExpConstants<double> {
  static constexpr double kLog2E = 1.44269504088896340736, kLn2High = 6.93147180369123816490e-01,
                          kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLowest = -746, kHighest = 710;
  static constexpr double kSaturated = -50;
  static constexpr int kFraction = 52, kBias = 1023;
};

// exp(r) - 1 for |r| <= ln 2 / 2.
template <class V>
FASTVIT_HOST_DEVICE V expm1_near_0(V r) {
  using S = std::remove_reference_t<decltype(V{}[0])>;
  V p{};
  if constexpr (sizeof(S) == 8) {
    p = p * r + 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
  }
  p = p * r + S(1.0 / 5040);
  p = p * r + S(1.0 / 720);
  p = p * r + S(1.0 / 120);
  p = p * r + S(1.0 / 24);
  p = p * r + S(1.0 / 6);
  p = p * r + S(0.5);
  return p * r * r + r;
}

template <class V>
struct ReducedExponent {  // v = n ln 2 + r
  using S = std::remove_reference_t<decltype(V{}[0])>;
  using Constants = ExpConstants<S>;
  using Integers = decltype(V{} < V{});
  Integers n;
  V r;

  explicit FASTVIT_HOST_DEVICE ReducedExponent(V v) {
    const V shifted = v * Constants::kLog2E + Constants::kRound;
    const V whole = shifted - Constants::kRound;
    n = Integers(shifted) - Integers(V{} + Constants::kRound);
    r = (v - whole * Constants::kLn2High) - whole * Constants::kLn2Low;
  }

  static FASTVIT_HOST_DEVICE V power_of_2(Integers k) {
    return V((k + Constants::kBias) << Constants::kFraction);
  }
};

template <class V, class = decltype(V{}[0])>
FASTVIT_HOST_DEVICE V fast_exp(V v) {
  using E = ReducedExponent<V>;
  v = v < E::Constants::kLowest ? V{} + E::Constants::kLowest : v;
  v = v > E::Constants::kHighest ? V{} + E::Constants::kHighest : v;
  const E e(v);
  const typename E::Integers half = e.n >> 1;  // two factors: 2^n may overflow where the result does not
  return (expm1_near_0(e.r) + typename E::S(1)) * E::power_of_2(half) * E::power_of_2(e.n - half);
}

// For v <= 0.
template <class V, class = decltype(V{}[0])>
FASTVIT_HOST_DEVICE V fast_expm1(V v) {
  using E = ReducedExponent<V>;
  v = v < E::Constants::kSaturated ? V{} + E::Constants::kSaturated : v;
  const E e(v);
  const V scale = E::power_of_2(e.n);
  return scale * expm1_near_0(e.r) + (scale - typename E::S(1));
}

template <class V, class = decltype(V{}[0])>
FASTVIT_HOST_DEVICE V fast_log1p(V v) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = std::log1p(v[i]);
  return v;
}

}  // namespace fastvit

#if defined(__AVX512F__)
#include "simd_math_avx512.h"
#endif
