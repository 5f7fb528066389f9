// fast_exp and reciprocal for 16 floats, by instructions of AVX-512.
//
// _mm512_scalef_ps multiplies by 2^n even where 2^n alone would overflow. _mm512_rcp14_ps approximates 1 / v
// to 14 bits; a step of Newton's method doubles the number of correct bits.
#pragma once

#include <immintrin.h>

#include "simd_math.h"

namespace fastvit {

typedef float Float32x16 __attribute__((vector_size(64)));

FASTVIT_FORCE_INLINE Float32x16 fast_exp(Float32x16 v) {
  using Constants = ExpConstants<float>;
  // _mm512_max_ps and _mm512_min_ps return their second argument if it is NaN, so NaN stays NaN.
  v = Float32x16(_mm512_max_ps(_mm512_set1_ps(Constants::kMinExp), __m512(v)));
  v = Float32x16(_mm512_min_ps(_mm512_set1_ps(Constants::kMaxExp), __m512(v)));
  const __m512 exponent = _mm512_roundscale_ps(__m512(v * Constants::kLog2E), 0);  // 0: to nearest integers
  const Float32x16 whole(exponent);
  const Float32x16 remainder = (v - whole * Constants::kLn2High) - whole * Constants::kLn2Low;
  return Float32x16(_mm512_scalef_ps(__m512(expm1_near_0(remainder) + 1.0f), exponent));
}

// Returns 1 / v. Every overload of reciprocal has a second argument, of the type of the elements, whose value
// is not used.
FASTVIT_FORCE_INLINE Float32x16 reciprocal(Float32x16 v, float) {
  const __m512 estimate = _mm512_rcp14_ps(__m512(v));
  const __m512 error = _mm512_fnmadd_ps(__m512(v), estimate, _mm512_set1_ps(1.0f));
  // If v is 0, infinite or NaN, the error is NaN and the estimate is already the result.
  const __mmask16 error_is_a_number = _mm512_cmp_ps_mask(error, error, _CMP_ORD_Q);
  return Float32x16(_mm512_mask_fmadd_ps(estimate, error_is_a_number, error, estimate));
}

}  // namespace fastvit
