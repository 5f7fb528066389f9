// The activations, their gradients and inverses, for host and device.
//
// `V` is a floating-point scalar or a GCC/Clang vector of them, `S` the scalar type. Every branch selects one
// of two computed values, so the code is the same for a scalar and for the lanes of a vector.
//
//   forward(v)        y = act(v)
//   backward(dy, v)   dy * act'(v), from the pre-activation v
//   inverse(y)        v, from the output, for an invertible activation (is_invertible)
//   backward_from_output(dy, y) dy * act'(v), from the output
//
// The slope at a kink is torch's. At v = 0 it is that of the negative side, so the inverse is correct where
// slope * v underflows to -0 or +0. NaN stays NaN in y.
#pragma once

#include "elementary_functions.h"

namespace fastvit {

enum class Activation : int { identity, relu, relu6, leaky_relu, elu, gelu, gelu_tanh, silu, hardswish };

constexpr const char* kActivationNames[] = {"identity", "relu",      "relu6", "leaky_relu", "elu",
                                            "gelu",     "gelu_tanh", "silu",  "hardswish"};

// Activations with an exponential, a logarithm or a quotient: their kernels are compute-bound.
constexpr bool is_transcendental(Activation a) {
  return a == Activation::elu || a == Activation::gelu || a == Activation::gelu_tanh || a == Activation::silu;
}
constexpr bool is_invertible(Activation a) {
  return a == Activation::identity || a == Activation::leaky_relu || a == Activation::elu;
}

template <Activation>
struct ActivationFunction;

template <>
struct ActivationFunction<Activation::identity> {
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S) {
    return v;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V, S) {
    return dy;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V inverse(V y, S) {
    return y;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V, S) {
    return dy;
  }
};

template <>
struct ActivationFunction<Activation::relu> {
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S) {
    return v <= S(0) ? V{} : v;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S) {
    return v <= S(0) ? V{} : dy;
  }
};

template <>
struct ActivationFunction<Activation::relu6> {
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S) {
    const V positive = v <= S(0) ? V{} : v;
    return positive >= S(6) ? V{} + S(6) : positive;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S) {
    const V positive = v <= S(0) ? V{} : dy;
    return v >= S(6) ? V{} : positive;
  }
};

template <>
struct ActivationFunction<Activation::leaky_relu> {  // param: slope of the negative side
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S slope) {
    return v > S(0) ? v : v * slope;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S slope) {
    return v > S(0) ? dy : dy * slope;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V inverse(V y, S slope) {
    return y > S(0) ? y : y * (S(1) / slope);  // one division, not one per element
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V y, S slope) {
    return y > S(0) ? dy : dy * slope;
  }
};

template <>
struct ActivationFunction<Activation::elu> {  // param: alpha; y = alpha * expm1(v) on the negative side
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S alpha) {
    const V negative = alpha * fast_expm1(v > S(0) ? V{} : v);
    return v > S(0) ? v : negative;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S alpha) {
    return v > S(0) ? dy : dy * (alpha * fast_exp(v > S(0) ? V{} : v));
  }
  // A saturated y is rounded to -alpha, and v is lost. The smallest v that S can represent stands for it,
  // which avoids log1p(-1). The gradient, dy * (y + alpha), is 0 there.
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V inverse(V y, S alpha) {
    const S lowest = S(sizeof(S) == 8 ? -1 + 0x1p-53 : -1 + 0x1p-24);
    const V u = max_propagating_nan(V(y * (S(1) / alpha)), lowest);
    const V negative = fast_log1p(y > S(0) ? V{} : u);
    return y > S(0) ? y : negative;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V y, S alpha) {
    return y > S(0) ? dy : dy * (y + alpha);
  }
};

template <>
struct ActivationFunction<Activation::gelu> {  // v * cdf(v) of the standard normal distribution
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S s) {
    return v * normal(v, s).cdf;
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S s) {
    const Normal<V> n = normal(v, s);
    return dy * (n.cdf + v * n.density);
  }
};

// v / 2 * (1 + tanh(u)) = v * sigmoid(2 u), u = sqrt(2 / pi) * (v + 0.044715 v^3)
template <>
struct ActivationFunction<Activation::gelu_tanh> {
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S s) {
    return v * sigmoid(V(v * (S(kTwice) + S(kTwice * kCubic) * v * v)), s);
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S s) {
    V square = v * v;
    square = square > S(400) ? V{} + S(400) : square;  // p is 0 or 1 beyond, and infinity would give NaN
    const V p = sigmoid(V(v * (S(kTwice) + S(kTwice * kCubic) * square)), s);
    return dy * (p + p * (S(1) - p) * v * (S(kTwice) + S(3 * kTwice * kCubic) * square));
  }
  static constexpr double kTwice = 1.59576912160573071176;  // 2 * sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;
};

template <>
struct ActivationFunction<Activation::silu> {
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S s) {
    return v * sigmoid(v, s);
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S s) {
    const V p = sigmoid(v, s);
    return dy * (p + p * (S(1) - p) * v);
  }
};

template <>
struct ActivationFunction<Activation::hardswish> {  // v * min(max(v + 3, 0), 6) / 6
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V forward(V v, S) {
    V gate = v + S(3);
    gate = gate < S(0) ? V{} : gate;
    gate = gate > S(6) ? V{} + S(6) : gate;
    return v * (gate * S(1.0 / 6));
  }
  template <class V, class S>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, S) {
    const V middle = v <= S(-3) ? V{} : dy * (v * S(1.0 / 3) + S(0.5));
    return v >= S(3) ? dy : middle;
  }
};

// xhat, recovered from the pre-activation v. Of n samples |xhat| <= sqrt(n - 1). Rounding of the stored y may
// violate this, so xhat is clamped. The limit is infinite for running statistics.
template <class V, class W, class S>
FASTVIT_HOST_DEVICE V recover_xhat(V v, W beta, W inverse_gamma, S limit) {
  return clamp_propagating_nan(V((v - beta) * inverse_gamma), limit);
}

// Calls f.template operator()<activation>().
template <class F>
FASTVIT_HOST_DEVICE void dispatch_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::identity:
      return f.template operator()<Activation::identity>();
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::relu6:
      return f.template operator()<Activation::relu6>();
    case Activation::leaky_relu:
      return f.template operator()<Activation::leaky_relu>();
    case Activation::elu:
      return f.template operator()<Activation::elu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::hardswish:
      return f.template operator()<Activation::hardswish>();
  }
  __builtin_unreachable();
}

}  // namespace fastvit
