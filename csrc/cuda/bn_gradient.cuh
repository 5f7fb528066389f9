// Shared by the kernels of bn_reduce and bn_backward: dv (the gradient of v, the activation's input), its
// sums, dx.
//
// A channel has two sums: of dv, and of dv * xhat. `second_factor` is dv's factor in the second sum:
//   input is x   second_factor = x - mean; the kernels multiply the finished sum by invstd.
//                dv = dy * act'(v), v = (x - mean) * scale + beta (+ residual). v equals the forward's v
//                bit by bit, if that is not invertible, so both are on one side of the activation's kink.
//   input is y   second_factor = xhat, which the inverse of the activation recovers from y. dv = dy * act'(v)
//                is computed from y.
// scale = gamma * invstd. A: type of the arithmetic, double for tensors of double and float for all others.
#pragma once

#include <cmath>

#include "../batch_norm.h"
#include "activations.cuh"
#include "channel_vector.cuh"
#include "merge_slices.cuh"

namespace fastvit {

// How dv is computed: from x; from x and a residual that was added before the activation; from y.
enum class GradientVariant { plain, residual, from_output };

// `saved` holds mean[C], invstd[C], and the count: the number of values per channel as two numbers, a
// high and a low part (pack_count).
template <class A>
__device__ __forceinline__ A load_saved_invstd(const BnBackwardArgs& args, int64_t c) {
  return static_cast<const A*>(args.saved)[args.layout.channels + c];
}
template <class A>
__device__ __forceinline__ A load_saved_count(const BnBackwardArgs& args) {
  return unpack_count<A>(static_cast<const A*>(args.saved) + 2 * args.layout.channels);
}

// |xhat| <= sqrt(n - 1) for n values. An xhat that is recovered from a rounded y may be larger, and is
// clamped. No other xhat is, so for an input x the bound is unused.
template <class A, GradientVariant kVariant>
__device__ __forceinline__ A compute_max_abs_xhat(const BnBackwardArgs& args) {
  return kVariant == GradientVariant::from_output ? std::sqrt(max(load_saved_count<A>(args) - 1, A(0)))
                                                  : A(0);
}

// The constants of a channel, for dv, second_factor and dx of its elements.
template <class A, GradientVariant kVariant>
struct GradientConstants {
  A mean_or_inverse_gamma;  // the input is x: mean; the input is y: 1 / gamma, as raised by the forward
  A scale, beta;

  __device__ __forceinline__ static GradientConstants load(const BnBackwardArgs& args, int64_t c) {
    const A beta = load_channel(args.bias, c, A(0));
    const A gamma = load_channel(args.weight, c, A(1));
    // An invertible forward raises |gamma| to a floor, which for float and double grows with |beta|. So xhat
    // is recovered from y with the raised gamma. `scale`, the factor of dx, has the given gamma.
    const A mean_or_inverse_gamma =
        kVariant == GradientVariant::from_output
            ? A(1) / effective_gamma(gamma, beta, gamma_floor<A>(/*invertible=*/true, args.dtype))
            : static_cast<const A*>(args.saved)[c];
    return {mean_or_inverse_gamma, gamma * load_saved_invstd<A>(args, c), beta};
  }
};

template <class A>
struct ElementGradient {
  A dv, second_factor;
};

// Act: the functions of the activation.
template <class Act, GradientVariant kVariant, class A>
__device__ __forceinline__ ElementGradient<A> compute_element_gradient(
    A input, A dy, A residual, const GradientConstants<A, kVariant>& constants, A activation_param,
    A max_abs_xhat) {
  if constexpr (kVariant == GradientVariant::from_output) {
    return {Act::backward_from_output(dy, input, activation_param),
            recover_xhat(Act::inverse(input, activation_param), constants.beta,
                         constants.mean_or_inverse_gamma, max_abs_xhat)};
  } else {
    const A centered = input - constants.mean_or_inverse_gamma;
    A v = fma_rn(centered, constants.scale, constants.beta);
    if constexpr (kVariant == GradientVariant::residual) v = add_rn(v, residual);
    return {Act::backward(dy, v, activation_param), centered};
  }
}

// The operands that are read, for a batch: the vectors that a thread loads together. T: storage type. B: type
// of the batch, B::U vectors of B::V elements of each operand. B::Single: type of a batch of one vector.
template <class T, GradientVariant kVariant, class B>
struct GradientInputs {
  static constexpr bool kHasResidual = kVariant == GradientVariant::residual;
  Vector<T, B::V> input[B::U], dy[B::U], residual[kHasResidual ? B::U : 1];

  // kResidualOperand: index of the residual's strides in args.layout, ReduceOperandIndex::residual or
  // BackwardOperandIndex::residual. The indices of input and dy are the same in both.
  template <CacheHint kHint, int kResidualOperand>
  __device__ __forceinline__ void load(const B& batch, const BnBackwardArgs& args) {
    batch.template load<kHint>(input, args.input, BackwardOperandIndex::input);
    batch.template load<kHint>(dy, args.dy, BackwardOperandIndex::dy);
    if constexpr (kHasResidual) batch.template load<kHint>(residual, args.residual, kResidualOperand);
  }
  __device__ __forceinline__ GradientInputs<T, kVariant, typename B::Single> get_vector(int j) const {
    return {{input[j]}, {dy[j]}, {residual[kHasResidual ? j : 0]}};
  }
};

// Adds a batch to the thread's sums. read_inputs(j) returns the inputs of the batch's vector j.
// kIsRows: element k of every vector is of the thread's column k, which has constants[k] and thread_sums[k].
// Otherwise (planes) all elements are of one channel, which has constants[0] and thread_sums[0].
// The choice of the activation is inside the loop over vectors: outside it would take more registers.
template <class T, bool kIsRows, GradientVariant kVariant, class B, class A, int kThreadChannels,
          class ReadInputs>
__device__ __forceinline__ void accumulate_sums(
    KahanSums<A> (&thread_sums)[kThreadChannels], const B&,
    const GradientConstants<A, kVariant> (&constants)[kThreadChannels], const BnBackwardArgs& args,
    A max_abs_xhat, const ReadInputs& read_inputs) {
  GradientSums<A> batch_sums[kThreadChannels];
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    dispatch_activation_for<T, /*kIncludesNonInvertible=*/kVariant != GradientVariant::from_output>(
        args.activation, [&]<class Act>(Act) {
          const GradientInputs<T, kVariant, typename B::Single> inputs = read_inputs(j);
          A input[B::V], dy[B::V];
          [[maybe_unused]] A residual[B::V];
          inputs.input[0].unpack(input);
          inputs.dy[0].unpack(dy);
          if constexpr (inputs.kHasResidual) inputs.residual[0].unpack(residual);
#pragma unroll
          for (int k = 0; k < B::V; ++k) {  // vectors past the end are zeros, so their dv is 0
            const ElementGradient<A> gradient = compute_element_gradient<Act, kVariant>(
                input[k], dy[k], inputs.kHasResidual ? residual[k] : A(0), constants[kIsRows ? k : 0],
                A(args.activation_param), max_abs_xhat);
            GradientSums<A>& sums = batch_sums[kIsRows ? k : 0];
            sums.dv = add_rn(sums.dv, gradient.dv);
            sums.dv_times_second_factor =
                fma_rn(gradient.dv, gradient.second_factor, sums.dv_times_second_factor);
          }
        });
#pragma unroll
  for (int k = 0; k < kThreadChannels; ++k) thread_sums[k].add(batch_sums[k]);
}

// The mean and invstd depend on x, too. So dx = scale * (dv - mean_dv - slope * second_factor), where mean_dv
// and slope are the same for all elements of a channel.
template <class A>
struct StatisticsCorrection {
  A mean_dv, slope;

  // `sums` and the count are of all ranks. The count is infinite for running statistics, so the result is 0.
  template <GradientVariant kVariant>
  __device__ __forceinline__ static StatisticsCorrection from_sums(const BnBackwardArgs& args, int64_t c,
                                                                   const GradientSums<A>& sums) {
    const A count = load_saved_count<A>(args);
    if (!(count > 0)) return {0, 0};
    // `sums` has the finished sum of dv * xhat. If the input is x, the slope includes invstd, since the
    // second_factor by which it is multiplied is x - mean.
    return {sums.dv / count,
            sums.dv_times_second_factor / count *
                (kVariant == GradientVariant::from_output ? A(1) : load_saved_invstd<A>(args, c))};
  }
};

// Computes and writes dx of a batch. If there is a residual, also writes its gradient dresidual, which is dv.
// In `inputs`, dx overwrites input, and dv overwrites dy. kIsRows: as in accumulate_sums.
template <bool kIsRows, GradientVariant kVariant, class T, class B, class A, int kThreadChannels>
__device__ __forceinline__ void write_gradients(
    const B& batch, GradientInputs<T, kVariant, B>& inputs,
    const GradientConstants<A, kVariant> (&constants)[kThreadChannels],
    const StatisticsCorrection<A> (&corrections)[kThreadChannels], const BnBackwardArgs& args,
    A max_abs_xhat) {
  constexpr bool kHasResidual = GradientInputs<T, kVariant, B>::kHasResidual;
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    dispatch_activation_for<T, /*kIncludesNonInvertible=*/kVariant != GradientVariant::from_output>(
        args.activation, [&]<class Act>(Act) {
          A input[B::V], dy[B::V];
          [[maybe_unused]] A residual[B::V];
          inputs.input[j].unpack(input);
          inputs.dy[j].unpack(dy);
          if constexpr (kHasResidual) inputs.residual[j].unpack(residual);
#pragma unroll
          for (int k = 0; k < B::V; ++k) {
            const int channel = kIsRows ? k : 0;
            const ElementGradient<A> gradient = compute_element_gradient<Act, kVariant>(
                input[k], dy[k], kHasResidual ? residual[k] : A(0), constants[channel],
                A(args.activation_param), max_abs_xhat);
            const A centered_dv = add_rn(gradient.dv, -corrections[channel].mean_dv);
            input[k] = constants[channel].scale *
                       fma_rn(-gradient.second_factor, corrections[channel].slope, centered_dv);
            dy[k] = gradient.dv;
          }
          inputs.input[j].pack(input);
          if constexpr (kHasResidual) inputs.dy[j].pack(dy);
        });
  batch.store(inputs.input, args.dx, BackwardOperandIndex::dx);
  if constexpr (kHasResidual) batch.store(inputs.dy, args.dresidual, BackwardOperandIndex::dresidual);
}

// Calls f.template operator()<kVariant>() for the arguments' variant.
template <class F>
auto dispatch_gradient_variant(const BnBackwardArgs& args, const F& f) {
  if (args.from_output) return f.template operator()<GradientVariant::from_output>();
  if (args.residual) return f.template operator()<GradientVariant::residual>();
  return f.template operator()<GradientVariant::plain>();
}

}  // namespace fastvit
