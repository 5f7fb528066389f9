// Which activations a kernel is compiled with, and gelu as 16-bit elements need it.
#pragma once

#include <cuda_runtime.h>  // first: elementary.h asks whether it is compiled for a GPU

#include "../activation.h"
#include "vector_io.cuh"

namespace fastvit {

// Kernels that move whole packets are compiled twice, so that relu does not pay for gelu's registers. Those
// of single elements, and of doubles, take few registers more: one kernel has them all.
enum class Activations { all, cheap, transcendental };

template <class T, int V, class F>  // f.template operator()<Activations>() for what `activation` belongs to
void with_activations(Activation activation, const F& f) {
  if constexpr (V == 1 || sizeof(T) == 8)
    f.template operator()<Activations::all>();
  else if (is_transcendental(activation))
    f.template operator()<Activations::transcendental>();
  else
    f.template operator()<Activations::cheap>();
}

// gelu for elements of 16 bits, in half the instructions: log2 of the upper tail of the standard normal
// distribution is a polynomial in |v|, fitted to |v| <= 5.5 so that |v| * tail is off by 2^-18.9 of itself,
// or of 2^-14 where it is less. Its leading coefficient is negative: far out the tail is 0.
struct NarrowGelu {
  __device__ __forceinline__ static float tail(float a) {
    return exp2_approximate(polynomial(a, -0.9999969954f, -1.151208385f, -0.4586367653f, -0.0537061647f,
                                       0.008333964781f, -0.0008705157893f, 5.148573649e-05f,
                                       -1.173408903e-06f));
  }
  __device__ __forceinline__ static float size(float v) {  // finite: infinity times a tail of 0 is NaN
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

// f(FnOf<T, ...>{}) for the activation chosen at run time; the branch is uniform, so it costs a test for a
// packet or more. Without kAny those that cannot be inverted are not compiled.
template <class T, Activations kSet, bool kAny, class F>
__device__ __forceinline__ void with_activation(Activation activation, const F& f) {
  const auto call = [&]<Activation kActivation>() {
    if constexpr (kCompiled<kActivation, kSet, kAny>) f(FnOf<T, kActivation>{});
  };
  switch (activation) {
    case Activation::identity:
      return call.template operator()<Activation::identity>();
    case Activation::relu:
      return call.template operator()<Activation::relu>();
    case Activation::relu6:
      return call.template operator()<Activation::relu6>();
    case Activation::leaky_relu:
      return call.template operator()<Activation::leaky_relu>();
    case Activation::elu:
      return call.template operator()<Activation::elu>();
    case Activation::gelu:
      return call.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return call.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return call.template operator()<Activation::silu>();
    case Activation::hardswish:
      return call.template operator()<Activation::hardswish>();
  }
}

}  // namespace fastvit
