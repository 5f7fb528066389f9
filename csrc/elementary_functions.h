// fast_exp, fast_expm1, fast_log1p, reciprocal, within and the like, sigmoid and the normal distribution: for a float or
// a double on host and device, and on the host for each lane of a GCC/Clang vector of them (`V` is either,
// `S` the scalar type). On the device, inline PTX replaces several C++ operations by one instruction.
//
// fast_expm1 is defined for v <= 0 and fast_log1p for -1 < v <= 0. On a GPU the float versions have no branches and
// use the instructions for 2^v and log2 v. These are accurate to their rounding, except where the result is
// near 0; there fast_expm1 and fast_log1p are v + v^2 p(v), where p interpolates at Chebyshev points. Errors are up
// to 2 + |v| units in the last place of fast_exp, 7 of fast_expm1 and 10 of fast_log1p.
#pragma once

#include <cmath>

#include "host_device.h"

#if !defined(__CUDACC__)
#include "simd_math.h"
#endif

namespace fastvit {

// c[0] + c[1] t + c[2] t^2 + ..., by Horner.
template <class V, class S>
FASTVIT_HOST_DEVICE V polynomial(V, S c) {
  return V{} + c;
}
template <class V, class S, class... More>
FASTVIT_HOST_DEVICE V polynomial(V t, S c, More... more) {
  return polynomial(t, more...) * t + c;
}

#if defined(__CUDACC__) || defined(CUDA_HOST_EMULATION)
FASTVIT_HOST_DEVICE float exp2_approximate(float v) {
#if defined(__CUDA_ARCH__)
  float r;  // to 2 ulp; a result below the normal numbers is 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#else
  return exp2f(v);
#endif
}
FASTVIT_HOST_DEVICE float log2_approximate(float v) {
#if defined(__CUDA_ARCH__)
  float r;  // to 2^-22.6, absolute from 0.5 to 2 and relative elsewhere
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#else
  return log2f(v);
#endif
}
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
FASTVIT_HOST_DEVICE float fast_exp(float v) {
  return exp2_approximate(v * kLog2E);
}
FASTVIT_HOST_DEVICE float fast_expm1(float v) {
  const float near =
      v * v * polynomial(v, 0.4999999896f, 0.1666656276f, 0.04164992996f, 0.008238221347f, 0.001164287033f) +
      v;
  const float far = fast_exp(v) - 1.0f;
  return v > -0.5f ? near : far;
}
FASTVIT_HOST_DEVICE float fast_log1p(float v) {
  const float near =
      v * v * polynomial(v, -0.5000004977f, 0.3332342402f, -0.2530975051f, 0.1670630499f, -0.3006740087f) + v;
  const float far = log2_approximate(1.0f + v) * kLn2;
  return v > -0.25f ? near : far;
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

// 1 / v
template <class V, class S>
FASTVIT_HOST_DEVICE V reciprocal(V v, S) {
  return S(1) / v;
}
FASTVIT_HOST_DEVICE float reciprocal(float v, float) {
#if defined(__CUDA_ARCH__)
  float r;  // to 1 ulp; a result below the normal numbers is 0
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
#else
  return 1.0f / v;
#endif
}

// max(v, least); NaN stays NaN.
template <class V, class S>
FASTVIT_HOST_DEVICE V max_propagating_nan(V v, S least) {
  return v < least ? V{} + least : v;
}
// min(v, most); NaN stays NaN.
template <class V, class S>
FASTVIT_HOST_DEVICE V min_propagating_nan(V v, S most) {
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
// v clamped to [-limit, limit]; NaN stays NaN.
template <class V, class S>
FASTVIT_HOST_DEVICE V clamp_propagating_nan(V v, S limit) {
  return max_propagating_nan(min_propagating_nan(v, limit), -limit);
}

// 1 / (1 + exp(-v))
template <class V, class S>
FASTVIT_HOST_DEVICE V sigmoid(V v, S s) {
  return reciprocal(V(S(1) + fast_exp(-v)), s);
}

// Mills' ratio of the standard normal distribution, (1 - cdf(a)) / density(a), for a >= 0.
//
// (a + k) times it is smooth in t = (a - k) / (a + k), as Schonfelder expands erfc in "Chebyshev Expansions
// for the Error and Related Functions", Math. Comp. 32 (1978). The polynomials interpolate it at the
// Chebyshev points of 0 <= a <= 15 and 0 <= a <= 39, past which the density is 0; their own relative error
// is 1.2e-9 for float and 4e-17 for double.
template <class V>
FASTVIT_HOST_DEVICE V mills_ratio(V a, float s) {
  const V r = reciprocal(V(a + 3.0f), s);
  return r * polynomial(V(1.0f - 6.0f * r), 1.827541794f, -1.276705964f, 5.76568812e-1f, -1.184701754e-1f,
                        -2.622506934e-2f, 1.747099892e-2f, 2.567181707e-3f, -2.593048172e-3f,
                        -6.133953026e-4f, 3.341935933e-4f, 1.390974947e-4f);
}
template <class V>
FASTVIT_HOST_DEVICE V mills_ratio(V a, double s) {
  const V r = reciprocal(V(a + 4.0), s);
  return r * polynomial(V(1.0 - 8.0 * r), 1.8932190633084853, -1.5237709108199821, 9.7040955486759832e-1,
                        -4.6754096299847673e-1, 1.5139176231189601e-1, -1.8900450857216238e-2,
                        -8.7222952622146718e-3, 4.0878556172320486e-3, 3.3424447738372694e-4,
                        -5.7926880572006252e-4, -4.7823121924845395e-6, 8.8093398178797705e-5,
                        1.7922532432564953e-6, -1.4836463875945651e-5, -1.5669738073859545e-6,
                        2.5562716761616399e-6, 6.609539743412198e-7, -3.8668051230991247e-7,
                        -1.9145832439230777e-7, 3.6543114288028984e-8, 3.4902352238751845e-8,
                        1.8222048241444261e-10, -2.4197549105386418e-9);
}

// The standard normal distribution, without the cancellation of 1 + erf in its lower tail.
template <class V>
struct Normal {
  V cdf, density;
};
template <class V, class S>
FASTVIT_HOST_DEVICE Normal<V> normal(V v, S s) {
  const V density = S(0.39894228040143267794) * fast_exp(v * v * S(-0.5));
  const V tail = density * mills_ratio(V(v < S(0) ? -v : v), s);
  return {v < S(0) ? tail : S(1) - tail, density};
}

}  // namespace fastvit
