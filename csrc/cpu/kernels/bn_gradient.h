// bn_reduce and bn_backward compute two numbers for each element. dv is the gradient of v, the activation's
// input. second_factor is what bn_reduce multiplies dv by in its second sum.
//
//   from x  second_factor = x - mean, which is xhat / invstd. v = second_factor * scale + beta (+ residual),
//           bit for bit as in the forward pass, so that v is on the same side of a kink of act.
//           dv = dy * act'(v). It is rounded before it is added to anything, so that bn_reduce, which may
//           store it, and bn_backward have the same bits.
//   from y  second_factor = xhat, recovered from y. dv = dy * act'(v), computed from y.
//
// Rows are layouts with the channel as fastest dimension (channels_last, tokens); planes are others (NCHW).
#pragma once

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles the kernels once per instruction set, each in its own namespace

template <class A>  // the accumulation type
struct SimdGradient {
  Simd<A> dv, second_factor;
};

// The constants of a plane's channel, or of a row's channels from first_channel on.
template <class A, bool kIsRows>
struct BnGradientConstants {
  using Constant = ChannelConstant<A, kIsRows>;
  Constant mean, scale, beta, inverse_gamma;
  A max_abs_xhat;  // the largest possible |xhat|; a recovered xhat is clamped to it
  A activation_param;

  BnGradientConstants(const CpuBnBackwardParams& args, int64_t first_channel)
      : mean(args.mean, first_channel),
        scale(args.scale, first_channel),
        beta(args.beta, first_channel),
        inverse_gamma(args.inverse_gamma, first_channel),
        max_abs_xhat(A(args.max_abs_xhat)),
        activation_param(A(args.activation_param)) {}

  // Computes the gradient of the vector at `position` of three spans (rows, planes, or segments of these):
  // `input`, which is x, or y with kFromOutput; `dy`; and `residual`, which may be null. T: storage type.
  template <bool kFromOutput, class ActFunction, class Position, class T>
  FASTVIT_FORCE_INLINE SimdGradient<A> evaluate(Position position, const T* input, const T* dy,
                                                const T* residual) const {
    const Simd<A> input_values = position.load(input), dy_values = position.load(dy);
    if constexpr (kFromOutput) {
      return {ActFunction::backward_from_output(dy_values, input_values, activation_param),
              recover_xhat(ActFunction::inverse(input_values, activation_param), beta.load(position),
                           inverse_gamma.load(position), max_abs_xhat)};
    } else {
      const Simd<A> centered = input_values - mean.load(position);
      Simd<A> v = multiply_add<A>(centered, scale.load(position), beta.load(position));
      if (residual) v += position.load(residual);
      return {round_product(ActFunction::backward(dy_values, v, activation_param)), centered};
    }
  }
};

// Runs GradientKernel<T, A, kIsRows, kFromOutput, kActivation>, which is bn_reduce's or bn_backward's.
template <template <class, class, bool, bool, Activation> class GradientKernel>
void dispatch_gradient(const CpuBnBackwardParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      const auto run_kernel = [&]<bool kIsRows>() {
        if constexpr (is_invertible(kActivation))
          if (args.from_output)
            return GradientKernel<T, A, kIsRows, /*kFromOutput=*/true, kActivation>{args}.run();
        GradientKernel<T, A, kIsRows, /*kFromOutput=*/false, kActivation>{args}.run();
      };
      args.layout.is_rows ? run_kernel.template operator()<true>() : run_kernel.template operator()<false>();
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
