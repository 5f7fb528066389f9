// The activation in a kernel, chosen at run time, and gelu for 16-bit elements.
#pragma once

#include "../activation_functions.h"
#include "vector_io.cuh"

namespace fastvit {

// gelu for 16-bit elements, with half the instructions: log2 of the upper tail of the standard normal
// distribution is a polynomial in |v|, fitted to |v| <= 5.5. The error of |v| * tail is at most 2^-18.9 of
// max(|v| * tail, 2^-14). The leading coefficient is negative, so the tail tends to 0.
struct Gelu16Bit {
  __device__ __forceinline__ static float tail(float a) {
    return exp2_approximate(polynomial(a, -0.9999969954f, -1.151208385f, -0.4586367653f, -0.0537061647f,
                                       0.008333964781f, -0.0008705157893f, 5.148573649e-05f,
                                       -1.173408903e-06f));
  }
  __device__ __forceinline__ static float size(float v) {  // finite, since infinity times a tail of 0 is NaN
    return min_propagating_nan(fabsf(v), 1e4f);
  }
  __device__ __forceinline__ static float forward(float v, float) {
    const float a = size(v);
    return (v > 0 ? v : 0) - a * tail(a);
  }
  __device__ __forceinline__ static float backward(float dy, float v, float) {
    const float a = size(v), lower = tail(a);
    const float density = exp2_approximate(v * v * -0.72134752f - 1.32574806f);
    return dy * (v * density + (v < 0 ? lower : 1 - lower));
  }
};

template <class T, Activation kActivation>
using ActivationFor = std::conditional_t<kActivation == Activation::gelu && sizeof(T) == 2, Gelu16Bit,
                                         ActivationFunction<kActivation>>;

template <Activation kActivation>
constexpr bool kInvertible = is_invertible(kActivation);

// f(ActivationFor<T, ...>{}) for the activation chosen at run time. The branch is uniform and is taken once for a
// vector or more. Without kAny only invertible activations are compiled.
template <class T, bool kAny, class F>
__device__ __forceinline__ void dispatch_activation_for(Activation activation, const F& f) {
  dispatch_activation(activation, [&]<Activation kActivation>() {
    if constexpr (kAny || kInvertible<kActivation>)
      f(ActivationFor<T, kActivation>{});
    else
      __builtin_unreachable();
  });
}

}  // namespace fastvit
