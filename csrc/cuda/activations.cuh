// dispatch_activation_for chooses the activation in a kernel at run time. Gelu16Bit is a faster gelu for
// 16-bit elements; the other activations are in activation_functions.h.
#pragma once

#include "../activation_functions.h"
#include "vector_io.cuh"

namespace fastvit {

// gelu with half the instructions, exact enough for 16-bit elements:
//   gelu(v) = max(v, 0) - |v| * upper_tail(|v|),
// where upper_tail(a) is the probability that a standard normal number is larger than a. Its log2 is a
// polynomial, fitted to a <= 5.5. The error of p = a * upper_tail(a) is at most 2^-18 * p, or 2^-32
// where p is below 2^-14. The leading coefficient is negative, so upper_tail tends to 0 for larger a.
struct Gelu16Bit {
  __device__ __forceinline__ static float upper_tail(float magnitude) {
    return exp2_approximate(polynomial(magnitude, -0.9999969954f, -1.151208385f, -0.4586367653f,
                                       -0.0537061647f, 0.008333964781f, -0.0008705157893f, 5.148573649e-05f,
                                       -1.173408903e-06f));
  }
  // Returns |v|, limited because infinity times a tail of 0 would be NaN.
  __device__ __forceinline__ static float finite_magnitude(float v) {
    return min_propagating_nan(fabsf(v), 1e4f);
  }
  // The unnamed parameter is that of other activations, such as leaky_relu's slope.
  __device__ __forceinline__ static float forward(float v, float) {
    const float magnitude = finite_magnitude(v);
    return (v > 0 ? v : 0) - magnitude * upper_tail(magnitude);
  }
  // Returns dy * gelu'(v) = dy * (v * density(v) + cdf(v)), with the density as a power of 2.
  __device__ __forceinline__ static float backward(float dy, float v, float) {
    const float magnitude = finite_magnitude(v), tail = upper_tail(magnitude);
    const float density = exp2_approximate(v * v * -0.72134752f - 1.32574806f);
    return dy * (v * density + (v < 0 ? tail : 1 - tail));
  }
};

// The functions of an activation for elements of type T.
template <class T, Activation kActivation>
using ActivationFor = std::conditional_t<kActivation == Activation::gelu && sizeof(T) == 2, Gelu16Bit,
                                         ActivationFunction<kActivation>>;

// Whether the activation's input can be computed from its output. A constant, since device code may not call
// a host function.
template <Activation kActivation>
constexpr bool kIsInvertible = is_invertible(kActivation);

// Calls f(ActivationFor<T, kActivation>{}) for the activation chosen at run time. All threads take the same
// branch, and take it once for a vector or a batch. kIncludesNonInvertible: any activation may be chosen;
// otherwise only the invertible ones are compiled.
template <class T, bool kIncludesNonInvertible, class F>
__device__ __forceinline__ void dispatch_activation_for(Activation activation, const F& f) {
  dispatch_activation(activation, [&]<Activation kActivation>() {
    if constexpr (kIncludesNonInvertible || kIsInvertible<kActivation>)
      f(ActivationFor<T, kActivation>{});
    else
      __builtin_unreachable();
  });
}

}  // namespace fastvit
