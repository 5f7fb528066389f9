// Shared by bn_reduce and bn_backward: the gradient before the activation, dv, and its factor in the second
// sum, `centred`.
//
//   from x    centred = x - mean; v = centred * scale + beta (+ residual), with the bits of the forward pass,
//             so that the activation is on the same side of its kink; dv = dy * act'(v)
//   from y    centred = xhat, recovered from y; dv = dy * act'(v) from y
#pragma once

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {

template <class A>
struct Gradient {
  Simd<A> dv, centred;
};

template <class A, bool kIsRows>
struct BnGradientConstants {
  using Constant = ChannelConstant<A, kIsRows>;
  Constant mean, scale, beta, inverse_gamma;
  A limit, param;

  BnGradientConstants(const CpuBnBackwardParams& args, int64_t c)
      : mean(args.saved, c),
        scale(args.scale, c),
        beta(args.beta, c),
        inverse_gamma(args.inverse_gamma, c),
        limit(A(args.xhat_limit)),
        param(A(args.activation_param)) {}

  // residual may be null.
  template <bool kFromOutput, class Fn, class Position, class T>
  FASTVIT_HOST_DEVICE Gradient<A> at(Position at, const T* input, const T* dy, const T* residual) const {
    const Simd<A> in = at.load(input), g = at.load(dy);
    if constexpr (kFromOutput) {
      return {Fn::backward_from_output(g, in, param),
              recover_xhat(Fn::inverse(in, param), beta.at(at), inverse_gamma.at(at), limit)};
    } else {
      const Simd<A> centred = in - mean.at(at);
      Simd<A> v = centred * scale.at(at) + beta.at(at);
      if (residual) v += at.load(residual);
      return {Fn::backward(g, v, param), centred};
    }
  }
};

// Runs the Kernel<T, A, rows, from output, activation> for the args of reduce or backward.
template <template <class, class, bool, bool, Activation> class Kernel>
void dispatch_gradient(const CpuBnBackwardParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      const auto walk = [&]<bool kIsRows>() {
        if constexpr (is_invertible(kActivation))
          if (args.from_output) return Kernel<T, A, kIsRows, true, kActivation>{args}.run();
        Kernel<T, A, kIsRows, false, kActivation>{args}.run();
      };
      args.layout.is_rows ? walk.template operator()<true>() : walk.template operator()<false>();
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
