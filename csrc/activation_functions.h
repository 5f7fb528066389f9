// The activations y = act(v), their gradients and inverses, for host and device. v is the value before act.
//
//   forward(v)                   y = act(v)
//   backward(dy, v)              dv = dy * act'(v)
//   inverse(y)                   v, for an invertible activation
//   backward_from_output(dy, y)  dv = dy * act'(v) for an invertible activation
//
// V: a float, a double, or a GCC/Clang vector of them. Scalar: the type of V's elements.
// The last argument is the activation's parameter. Without a parameter, the argument only gives the type
// Scalar: it has no name or is `type_only`, and its value is not used. Every branch selects one of two
// computed values, so the code is the same for a scalar and for a vector.
//
// The gradient at a kink is torch's: at v = 0 that of the side v < 0. So backward_from_output is right also
// where leaky_relu of a tiny negative v has underflowed to y = 0. If v is NaN, y is NaN.
#pragma once

#include "elementary_functions.h"

namespace fastvit {

enum class Activation : int { identity, relu, relu6, leaky_relu, elu, gelu, gelu_tanh, silu, hardswish };

constexpr const char* kActivationNames[] = {"identity", "relu",      "relu6", "leaky_relu", "elu",
                                            "gelu",     "gelu_tanh", "silu",  "hardswish"};

// True for an activation with an exponential. It takes so long that a CPU kernel need not save loads or
// branches round it.
constexpr bool is_transcendental(Activation a) {
  return a == Activation::elu || a == Activation::gelu || a == Activation::gelu_tanh || a == Activation::silu;
}

// True if v can be recovered from y. Only then may an op overwrite x by y.
constexpr bool is_invertible(Activation a) {
  return a == Activation::identity || a == Activation::leaky_relu || a == Activation::elu;
}

template <Activation>
struct ActivationFunction;

template <>
struct ActivationFunction<Activation::identity> {  // y = v
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar) {
    return v;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V, Scalar) {
    return dy;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V inverse(V y, Scalar) {
    return y;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V, Scalar) {
    return dy;
  }
};

template <>
struct ActivationFunction<Activation::relu> {  // y = max(v, 0)
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar) {
    return v <= Scalar(0) ? V{} : v;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar) {
    return v <= Scalar(0) ? V{} : dy;
  }
};

template <>
struct ActivationFunction<Activation::relu6> {  // y = min(max(v, 0), 6)
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar) {
    const V positive = v <= Scalar(0) ? V{} : v;
    return positive >= Scalar(6) ? V{} + Scalar(6) : positive;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar) {
    const V dv_below_6 = v <= Scalar(0) ? V{} : dy;
    return v >= Scalar(6) ? V{} : dv_below_6;
  }
};

template <>
struct ActivationFunction<Activation::leaky_relu> {  // y = slope * v for v <= 0
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar slope) {
    return v > Scalar(0) ? v : v * slope;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar slope) {
    return v > Scalar(0) ? dy : dy * slope;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V inverse(V y, Scalar slope) {
    return y > Scalar(0) ? y : y * (Scalar(1) / slope);  // the quotient is the same for all elements
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V y, Scalar slope) {
    return y > Scalar(0) ? dy : dy * slope;
  }
};

template <>
struct ActivationFunction<Activation::elu> {  // y = alpha * expm1(v) for v <= 0
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar alpha) {
    const V negative = alpha * fast_expm1(v > Scalar(0) ? V{} : v);
    return v > Scalar(0) ? v : negative;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar alpha) {
    return v > Scalar(0) ? dy : dy * (alpha * fast_exp(v > Scalar(0) ? V{} : v));
  }
  // For v far below 0, y is rounded to -alpha and v is lost. The result is then log1p of the smallest number
  // above -1, since log1p(-1) is infinite. The gradient dy * (y + alpha) is 0 there.
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V inverse(V y, Scalar alpha) {
    const Scalar above_minus_1 = Scalar(sizeof(Scalar) == 8 ? -1 + 0x1p-53 : -1 + 0x1p-24);
    const V expm1_of_v = max_propagating_nan(V(y * (Scalar(1) / alpha)), above_minus_1);
    const V negative = fast_log1p(y > Scalar(0) ? V{} : expm1_of_v);
    return y > Scalar(0) ? y : negative;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward_from_output(V dy, V y, Scalar alpha) {
    return y > Scalar(0) ? dy : dy * (y + alpha);
  }
};

template <>
struct ActivationFunction<Activation::gelu> {  // y = v * cdf(v), of the standard normal distribution
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar type_only) {
    return v * normal(v, type_only).cdf;
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar type_only) {
    const CdfAndDensity<V> at_v = normal(v, type_only);
    return dy * (at_v.cdf + v * at_v.density);
  }
};

// y = v / 2 * (1 + tanh(u)) = v * sigmoid(2 u), where u = sqrt(2 / pi) * (v + 0.044715 v^3).
template <>
struct ActivationFunction<Activation::gelu_tanh> {
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar type_only) {
    return v * sigmoid(V(v * (Scalar(kLinear) + Scalar(kLinear * kCubicRatio) * v * v)), type_only);
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar type_only) {
    V square = v * v;
    // From v^2 = 400 on, sigmoid(2 u) is less than 1e-261 away from 0 or 1. A larger v^2 could be infinite,
    // which would give a NaN.
    square = square > Scalar(400) ? V{} + Scalar(400) : square;
    const V sigmoid_2u =
        sigmoid(V(v * (Scalar(kLinear) + Scalar(kLinear * kCubicRatio) * square)), type_only);
    return dy * (sigmoid_2u + sigmoid_2u * (Scalar(1) - sigmoid_2u) * v *
                                  (Scalar(kLinear) + Scalar(3 * kLinear * kCubicRatio) * square));
  }
  // The argument of the sigmoid is 2 u = kLinear * (v + kCubicRatio * v^3).
  static constexpr double kLinear = 1.59576912160573071176;  // 2 * sqrt(2 / pi)
  static constexpr double kCubicRatio = 0.044715;
};

template <>
struct ActivationFunction<Activation::silu> {  // y = v * sigmoid(v)
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar type_only) {
    return v * sigmoid(v, type_only);
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar type_only) {
    const V sigmoid_v = sigmoid(v, type_only);
    return dy * (sigmoid_v + sigmoid_v * (Scalar(1) - sigmoid_v) * v);
  }
};

template <>
struct ActivationFunction<Activation::hardswish> {  // y = v * min(max(v + 3, 0), 6) / 6
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V forward(V v, Scalar) {
    V relu6 = v + Scalar(3);
    relu6 = relu6 < Scalar(0) ? V{} : relu6;
    relu6 = relu6 > Scalar(6) ? V{} + Scalar(6) : relu6;
    return v * (relu6 * Scalar(1.0 / 6));
  }
  template <class V, class Scalar>
  static FASTVIT_HOST_DEVICE V backward(V dy, V v, Scalar) {
    const V dv_below_3 = v <= Scalar(-3) ? V{} : dy * (v * Scalar(1.0 / 3) + Scalar(0.5));
    return v >= Scalar(3) ? dy : dv_below_3;
  }
};

// Returns xhat = (x - mean) * invstd, recovered from v = gamma * xhat + beta.
// limit: the largest |xhat| is sqrt(n - 1) with the mean and invstd of n values, and infinite with running
// statistics. The rounding of y may make |xhat| larger, so xhat is clamped.
// PerChannel: V, or its scalar type where all lanes of a vector have one channel.
template <class V, class PerChannel, class Scalar>
FASTVIT_HOST_DEVICE V recover_xhat(V v, PerChannel beta, PerChannel inverse_gamma, Scalar limit) {
  return clamp_propagating_nan(V((v - beta) * inverse_gamma), limit);
}

// Calls function.template operator()<activation>().
template <class Function>
FASTVIT_HOST_DEVICE void dispatch_activation(Activation activation, const Function& function) {
  switch (activation) {
    case Activation::identity:
      return function.template operator()<Activation::identity>();
    case Activation::relu:
      return function.template operator()<Activation::relu>();
    case Activation::relu6:
      return function.template operator()<Activation::relu6>();
    case Activation::leaky_relu:
      return function.template operator()<Activation::leaky_relu>();
    case Activation::elu:
      return function.template operator()<Activation::elu>();
    case Activation::gelu:
      return function.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return function.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return function.template operator()<Activation::silu>();
    case Activation::hardswish:
      return function.template operator()<Activation::hardswish>();
  }
  __builtin_unreachable();
}

}  // namespace fastvit
