// fast_exp, fast_expm1 (for v <= 0), fast_log1p (for -1 < v <= 0), reciprocal, clamps, sigmoid and the normal
// distribution, for host and device.
//
// V: a float, a double, or on the host a GCC/Clang vector of them. Scalar: the type of V's elements.
// An argument `type_only` gives the type Scalar; its value is not used.
//
// On a GPU the float versions of the first three have no branches: they use the instructions for 2^v and
// log2 v. Near a result of 0, where these lose digits, fast_expm1 and fast_log1p are v + v^2 p(v), where the
// polynomial p interpolates (f(v) - v) / v^2 at Chebyshev points. In units in the last place, errors are at
// most 2 + |v| for fast_exp, 7 for fast_expm1 and 10 for fast_log1p.
#pragma once

#include <cmath>

#include "host_device.h"

#if !defined(__CUDACC__)
#include "simd_math.h"
#endif

namespace fastvit {

#if defined(__CUDACC__)
// CUDA kernels store no value for another kernel to compute with, so the compiler may fuse the product.
template <class V>
FASTVIT_HOST_DEVICE V round_product(V product) {
  return product;
}
#endif

// Returns c0 + c1 t + c2 t^2 + ... for the coefficients c0, c1, c2, ..., by Horner's rule.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V polynomial(V, Scalar c0) {
  return V{} + c0;
}
template <class V, class Scalar, class... Scalars>
FASTVIT_HOST_DEVICE V polynomial(V t, Scalar c0, Scalars... higher_coefficients) {
  return polynomial(t, higher_coefficients...) * t + c0;
}

// CUDA_HOST_EMULATION: the tests compile the CUDA kernels for a CPU.
#if defined(__CUDACC__) || defined(CUDA_HOST_EMULATION)
FASTVIT_HOST_DEVICE float exp2_approximate(float v) {
#if defined(__CUDA_ARCH__)
  float result;  // with an error of at most 2 ulp; a subnormal result is flushed to 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#else
  return exp2f(v);
#endif
}
FASTVIT_HOST_DEVICE float log2_approximate(float v) {
#if defined(__CUDA_ARCH__)
  float result;  // with an error of at most 2^-22.6: absolute for v from 0.5 to 2, relative elsewhere
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#else
  return log2f(v);
#endif
}
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
FASTVIT_HOST_DEVICE float fast_exp(float v) {
  return exp2_approximate(v * kLog2E);
}
FASTVIT_HOST_DEVICE float fast_expm1(float v) {
  const float near_zero =
      v * v * polynomial(v, 0.4999999896f, 0.1666656276f, 0.04164992996f, 0.008238221347f, 0.001164287033f) +
      v;
  const float elsewhere = fast_exp(v) - 1.0f;
  return v > -0.5f ? near_zero : elsewhere;
}
FASTVIT_HOST_DEVICE float fast_log1p(float v) {
  const float near_zero =
      v * v * polynomial(v, -0.5000004977f, 0.3332342402f, -0.2530975051f, 0.1670630499f, -0.3006740087f) + v;
  const float elsewhere = log2_approximate(1.0f + v) * kLn2;
  return v > -0.25f ? near_zero : elsewhere;
}
#else
FASTVIT_HOST_DEVICE float fast_exp(float v) {
  return expf(v);
}
FASTVIT_HOST_DEVICE float fast_expm1(float v) {
  return expm1f(v);
}
FASTVIT_HOST_DEVICE float fast_log1p(float v) {
  return log1pf(v);
}
#endif
FASTVIT_HOST_DEVICE double fast_exp(double v) {
  return exp(v);
}
FASTVIT_HOST_DEVICE double fast_expm1(double v) {
  return expm1(v);
}
FASTVIT_HOST_DEVICE double fast_log1p(double v) {
  return log1p(v);
}

// Returns 1 / v.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V reciprocal(V v, Scalar) {
  return Scalar(1) / v;
}
FASTVIT_HOST_DEVICE float reciprocal(float v, float) {
#if defined(__CUDA_ARCH__)
  float result;  // with an error of at most 1 ulp; a subnormal result is flushed to 0
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#else
  return 1.0f / v;
#endif
}

// Returns max(v, least), but NaN if v is NaN; fmax would return `least`.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V max_propagating_nan(V v, Scalar least) {
  return v < least ? V{} + least : v;
}
// Returns min(v, most), but NaN if v is NaN.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V min_propagating_nan(V v, Scalar most) {
  return v > most ? V{} + most : v;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
FASTVIT_HOST_DEVICE float max_propagating_nan(float v, float least) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(least));
  return v;
}
FASTVIT_HOST_DEVICE float min_propagating_nan(float v, float most) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(most));
  return v;
}
#endif
// Returns v clamped to [-limit, limit], but NaN if v is NaN.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V clamp_propagating_nan(V v, Scalar limit) {
  return max_propagating_nan(min_propagating_nan(v, limit), -limit);
}

// Returns 1 / (1 + exp(-v)).
template <class V, class Scalar>
FASTVIT_HOST_DEVICE V sigmoid(V v, Scalar type_only) {
  return reciprocal(V(Scalar(1) + fast_exp(-v)), type_only);
}

// Returns Mills' ratio of the standard normal distribution, (1 - cdf(a)) / density(a), for a >= 0.
//
// The ratio times (a + k) is a smooth function of t = (a - k) / (a + k) = 1 - 2k / (a + k), as in
// Schonfelder, "Chebyshev Expansions for the Error and Related Functions", Math. Comp. 32 (1978). Here k is 3
// for float and 4 for double. A polynomial in t interpolates that product at the Chebyshev points of
// 0 <= a <= 15 for float and 0 <= a <= 39 for double; for larger a the density is 0. The relative error of
// the polynomial is 1.2e-9 for float and 4e-17 for double.
template <class V>
FASTVIT_HOST_DEVICE V mills_ratio(V a, float type_only) {
  const V inverse = reciprocal(V(a + 3.0f), type_only);
  return inverse * polynomial(V(1.0f - 6.0f * inverse), 1.827541794f, -1.276705964f, 5.76568812e-1f,
                              -1.184701754e-1f, -2.622506934e-2f, 1.747099892e-2f, 2.567181707e-3f,
                              -2.593048172e-3f, -6.133953026e-4f, 3.341935933e-4f, 1.390974947e-4f);
}
template <class V>
FASTVIT_HOST_DEVICE V mills_ratio(V a, double type_only) {
  const V inverse = reciprocal(V(a + 4.0), type_only);
  return inverse * polynomial(V(1.0 - 8.0 * inverse), 1.8932190633084853, -1.5237709108199821,
                              9.7040955486759832e-1, -4.6754096299847673e-1, 1.5139176231189601e-1,
                              -1.8900450857216238e-2, -8.7222952622146718e-3, 4.0878556172320486e-3,
                              3.3424447738372694e-4, -5.7926880572006252e-4, -4.7823121924845395e-6,
                              8.8093398178797705e-5, 1.7922532432564953e-6, -1.4836463875945651e-5,
                              -1.5669738073859545e-6, 2.5562716761616399e-6, 6.609539743412198e-7,
                              -3.8668051230991247e-7, -1.9145832439230777e-7, 3.6543114288028984e-8,
                              3.4902352238751845e-8, 1.8222048241444261e-10, -2.4197549105386418e-9);
}

template <class V>
struct CdfAndDensity {
  V cdf, density;
};

// Returns the cdf and the density of the standard normal distribution at v. The usual formula of the cdf,
// (1 + erf(v / sqrt(2))) / 2, cancels for v far below 0; here the tail beyond |v| is computed directly.
template <class V, class Scalar>
FASTVIT_HOST_DEVICE CdfAndDensity<V> normal(V v, Scalar type_only) {
  const V density = Scalar(0.39894228040143267794) * fast_exp(v * v * Scalar(-0.5));
  // Rounded, so that the cdf has the same bits in every kernel.
  const V tail = round_product(V(density * mills_ratio(V(v < Scalar(0) ? -v : v), type_only)));
  return {v < Scalar(0) ? tail : Scalar(1) - tail, density};
}

}  // namespace fastvit
