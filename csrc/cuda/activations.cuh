// The sets of activations that kernels are compiled with, and gelu for 16-bit elements.
#pragma once

#include <cuda_runtime.h>  // first, since elementary.h depends on its macros

#include "../activation_functions.h"
#include "vector_io.cuh"

namespace fastvit {

// Kernels with vectors of 16 bytes are compiled twice, so that relu does not take gelu's registers. For
// single elements and doubles the difference is small, so one kernel has all activations.
enum class Activations { all, cheap, transcendental };

template <class T, int V, class F>  // f.template operator()<Activations>() for the set of `activation`
void with_activations(Activation activation, const F& f) {
  if constexpr (V == 1 || sizeof(T) == 8)
    f.template operator()<Activations::all>();
  else if (is_transcendental(activation))
    f.template operator()<Activations::transcendental>();
  else
    f.template operator()<Activations::cheap>();
}

// gelu for 16-bit elements, with half the instructions: log2 of the upper tail of the standard normal
// distribution is a polynomial in |v|, fitted to |v| <= 5.5. The error of |v| * tail is at most 2^-18.9 of
// max(|v| * tail, 2^-14). The leading coefficient is negative, so the tail tends to 0.
struct NarrowGelu {
  __device__ __forceinline__ static float tail(float a) {
    return exp2_approximate(polynomial(a, -0.9999969954f, -1.151208385f, -0.4586367653f, -0.0537061647f,
                                       0.008333964781f, -0.0008705157893f, 5.148573649e-05f,
                                       -1.173408903e-06f));
  }
  __device__ __forceinline__ static float size(float v) {  // finite, since infinity times a tail of 0 is NaN
    return at_most(fabsf(v), 1e4f);
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
using FnOf = std::conditional_t<kActivation == Activation::gelu && sizeof(T) == 2, NarrowGelu,
                                ActivationFn<kActivation>>;

template <Activation kActivation, Activations kSet, bool kAny>
constexpr bool kCompiled =
    (kAny || is_invertible(kActivation)) &&
    (is_transcendental(kActivation) ? kSet != Activations::cheap : kSet != Activations::transcendental);

// f(FnOf<T, ...>{}) for the activation chosen at run time, which is one of the set that the host has chosen
// the kernel by. The branch is uniform and is taken once for a vector or more. Without kAny only invertible
// activations are compiled.
template <class T, Activations kSet, bool kAny, class F>
__device__ __forceinline__ void with_activation(Activation activation, const F& f) {
  const auto call = [&]<Activation kActivation>() {
    if constexpr (kCompiled<kActivation, kSet, kAny>)
      f(FnOf<T, kActivation>{});
    else
      __builtin_unreachable();
  };
  dispatch_activation(activation, call);
}

}  // namespace fastvit
