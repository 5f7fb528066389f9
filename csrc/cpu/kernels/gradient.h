// Shared by bn_reduce and bn_backward: the gradient before the activation, dz, and its factor in the second
// sum, `centred`.
//
//   from x    centred = x - mean; v = centred * scale + beta (+ z), with the bits of the forward pass,
//             so that the activation is on the same side of its kink; dz = dy * act'(v)
//   in place  centred = xhat, recovered from y; dz = dy * act'(v) from y
#pragma once

#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {

template <class A>
struct Gradient {
  Vector<A> dz, centred;
};

template <class A, bool kRows>
struct GradientConstants {
  using Constant = PerChannel<A, kRows>;
  Constant mean, scale, beta, inverse_gamma;
  A limit, param;

  template <class Args>
  GradientConstants(const GradientParams<Args>& args, int64_t c)
      : mean(args.saved, c),
        scale(args.scale, c),
        beta(args.beta, c),
        inverse_gamma(args.inverse_gamma, c),
        limit(A(args.limit)),
        param(A(args.activation_param)) {}

  // z may be null.
  template <bool kInPlace, class Fn, class At, class T>
  FASTVIT_INLINE Gradient<A> at(At at, const T* input, const T* dy, const T* z) const {
    const Vector<A> in = at.load(input), g = at.load(dy);
    if constexpr (kInPlace) {
      return {Fn::backward_y(g, in, param),
              recover_xhat(Fn::inverse(in, param), beta.at(at), inverse_gamma.at(at), limit)};
    } else {
      const Vector<A> centred = in - mean.at(at);
      Vector<A> v = centred * scale.at(at) + beta.at(at);
      if (z) v += at.load(z);
      return {Fn::backward(g, v, param), centred};
    }
  }
};

// Runs the Kernel<T, A, rows, in place, activation> for the args of a backward op.
template <template <class, class, bool, bool, Activation> class Kernel, class Args>
void dispatch_gradient(const Args& args) {
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      const auto walk = [&]<bool kRows>() {
        if constexpr (is_invertible(kActivation))
          if (args.in_place) return Kernel<T, A, kRows, true, kActivation>{args}.run();
        Kernel<T, A, kRows, false, kActivation>{args}.run();
      };
      args.layout.rows ? walk.template operator()<true>() : walk.template operator()<false>();
    });
  });
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
