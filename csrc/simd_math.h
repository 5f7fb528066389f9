// fast_exp, fast_expm1 and fast_log1p on the host, for GCC/Clang vectors V of float or double, of any width.
//
// exp(v) = 2^exponent * exp(remainder): the exponent is the integer nearest to v / ln 2, and the remainder is
// v - exponent * ln 2, at most ln 2 / 2 in size. ln 2 is kLn2High + kLn2Low, and exponent * kLn2High is exact
// (Cody, Waite, "Software Manual for the Elementary Functions", 1980, chapter 6). exp(remainder) is a Taylor
// polynomial, of degree 7 for float and 13 for double; the terms left out are below half a unit in the last
// place. The errors of the functions are 1 to 2 units in the last place.
#pragma once

#include <cmath>
#include <type_traits>

#include "host_device.h"

namespace fastvit {

// Returns a product as it is rounded: on x86-64 and aarch64 the compiler cannot fuse it with a sum of which
// it is a term. V: a scalar, or a vector no wider than a register.
template <class V>
FASTVIT_FORCE_INLINE V round_product(V product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// The type of a vector's elements.
template <class V>
using ElementOf = std::remove_reference_t<decltype(V{}[0])>;

template <class Scalar>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // The bits of v + kRound, minus those of kRound, are the integer nearest to v.
  static constexpr float kRound = 0x1.8p23f;
  static constexpr float kMinExp = -104;                         // exp(v) is 0 for a smaller v
  static constexpr float kMaxExp = 89;                           // exp(v) is infinite for a larger v
  static constexpr float kMinExpm1 = -30;                        // expm1(v) is -1 for a smaller v
  static constexpr int kFractionBits = 23, kExponentBias = 127;  // of the IEEE format
};
template <>
struct ExpConstants<double> {
  static constexpr double kLog2E = 1.44269504088896340736, kLn2High = 6.93147180369123816490e-01,
                          kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kMinExp = -746, kMaxExp = 710;
  static constexpr double kMinExpm1 = -50;
  static constexpr int kFractionBits = 52, kExponentBias = 1023;
};

// Returns exp(v) - 1 for |v| <= ln 2 / 2, from the Taylor series. Its terms are computed in pairs, which do
// not wait for each other, and the pairs are summed by Horner's rule in v^2. The chain of dependent
// instructions is half as long as that of all terms, and its length decides the speed.
template <class V>
FASTVIT_FORCE_INLINE V expm1_near_0(V v) {
  using Scalar = ElementOf<V>;
  const V square = v * v, terms_2_3 = v * Scalar(1.0 / 6) + Scalar(0.5),
          terms_4_5 = v * Scalar(1.0 / 120) + Scalar(1.0 / 24);
  V terms_from_6 = v * Scalar(1.0 / 5040) + Scalar(1.0 / 720);
  if constexpr (sizeof(Scalar) == 8) {
    const V terms_8_9 = v * (1.0 / 362880) + 1.0 / 40320, terms_10_11 = v * (1.0 / 39916800) + 1.0 / 3628800,
            terms_12_13 = v * (1.0 / 6227020800) + 1.0 / 479001600;
    terms_from_6 += ((terms_12_13 * square + terms_10_11) * square + terms_8_9) * square;
  }
  return ((terms_from_6 * square + terms_4_5) * square + terms_2_3) * square + v;
}

// v = exponent * ln 2 + remainder, per lane.
template <class V>
struct ReducedArgument {
  using Scalar = ElementOf<V>;
  using Constants = ExpConstants<Scalar>;
  using Integers = decltype(V{} < V{});  // a vector of as many integers, of the elements' size
  Integers exponent;
  V remainder;

  explicit FASTVIT_FORCE_INLINE ReducedArgument(V v) {
    const V shifted = v * Constants::kLog2E + Constants::kRound;
    const V whole = shifted - Constants::kRound;
    exponent = Integers(shifted) - Integers(V{} + Constants::kRound);  // casts of vectors keep the bits
    remainder = (v - whole * Constants::kLn2High) - whole * Constants::kLn2Low;
  }

  static FASTVIT_FORCE_INLINE V power_of_2(Integers k) {
    return V((k + Constants::kExponentBias) << Constants::kFractionBits);
  }
};

// In this and the next two functions, the second template parameter excludes scalars.
template <class V, class = decltype(V{}[0])>
FASTVIT_FORCE_INLINE V fast_exp(V v) {
  using Reduced = ReducedArgument<V>;
  using Constants = typename Reduced::Constants;
  v = v < Constants::kMinExp ? V{} + Constants::kMinExp : v;
  v = v > Constants::kMaxExp ? V{} + Constants::kMaxExp : v;
  const Reduced reduced(v);
  // power_of_2 makes normal numbers only. 2^exponent may be no normal number though exp(v) is finite and not
  // 0, so it is made as the product of two normal factors.
  const typename Reduced::Integers half = reduced.exponent >> 1;
  return (expm1_near_0(reduced.remainder) + typename Reduced::Scalar(1)) * Reduced::power_of_2(half) *
         Reduced::power_of_2(reduced.exponent - half);
}

// For v <= 0.
template <class V, class = decltype(V{}[0])>
FASTVIT_FORCE_INLINE V fast_expm1(V v) {
  using Reduced = ReducedArgument<V>;
  using Constants = typename Reduced::Constants;
  v = v < Constants::kMinExpm1 ? V{} + Constants::kMinExpm1 : v;
  const Reduced reduced(v);
  const V scale = Reduced::power_of_2(reduced.exponent);
  return scale * expm1_near_0(reduced.remainder) + (scale - typename Reduced::Scalar(1));
}

template <class V, class = decltype(V{}[0])>
FASTVIT_FORCE_INLINE V fast_log1p(V v) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = std::log1p(v[i]);
  return v;
}

}  // namespace fastvit

#if defined(__AVX512F__)  // fast_exp and reciprocal by instructions of AVX-512, for vectors of 16 floats
#include "simd_math_avx512.h"
#endif
