// Shared by reduce and backward: the gradient before the activation, dv, and its factor in the second sum,
// `centred`.
//
//   from x    centred = x - mean; v = centred * scale + beta (+ residual), with the bits of the forward
//             pass, so that the activation is on the same side of its kink; dv = dy * act'(v)
//   from y    centred = xhat, recovered from y; dv = dy * act'(v) from y
#pragma once

#include <cmath>

#include "../batch_norm.h"
#include "activations.cuh"
#include "channel_vector.cuh"
#include "merge_slices.cuh"

namespace fastvit {

enum class GradientVariant { plain, residual, from_output };

template <class A>
__device__ __forceinline__ A saved_invstd(const BnBackwardArgs& args, int64_t c) {
  return static_cast<const A*>(args.saved)[args.layout.channels + c];
}
template <class A>
__device__ __forceinline__ A saved_count(const BnBackwardArgs& args) {
  return unpack_count<A>(static_cast<const A*>(args.saved) + 2 * args.layout.channels);
}
template <class A, GradientVariant kVariant>
__device__ __forceinline__ A xhat_limit_of(const BnBackwardArgs& args) {
  return kVariant == GradientVariant::from_output ? std::sqrt(max(saved_count<A>(args) - 1, A(0))) : A(0);
}

// The constants of one channel. `mean_or_inverse_gamma` is 1 / gamma where the input is y, and otherwise the
// mean.
template <class A, GradientVariant kVariant>
struct GradientConstants {
  A mean_or_inverse_gamma, scale, beta;

  __device__ __forceinline__ static GradientConstants of(const BnBackwardArgs& args, int64_t c) {
    const A beta = load_channel(args.bias, c, A(0));
    const A gamma = load_channel(args.weight, c, A(1));  // the floor applies to the inversion only
    const A first = kVariant == GradientVariant::from_output
                        ? A(1) / effective_gamma(gamma, beta, gamma_floor<A>(true, args.dtype))
                        : static_cast<const A*>(args.saved)[c];
    return {first, gamma * saved_invstd<A>(args, c), beta};
  }
};

template <class A>
struct ElementGradient {
  A dv, second_factor;
};

template <class Fn, GradientVariant kVariant, class A>
__device__ __forceinline__ ElementGradient<A> gradient_of(A input, A dy, A residual,
                                                          const GradientConstants<A, kVariant>& k, A param,
                                                          A limit) {
  if constexpr (kVariant == GradientVariant::from_output) {
    return {Fn::backward_from_output(dy, input, param),
            recover_xhat(Fn::inverse(input, param), k.beta, k.mean_or_inverse_gamma, limit)};
  } else {
    const A centered = input - k.mean_or_inverse_gamma;
    A v = fma_rn(centered, k.scale, k.beta);
    if constexpr (kVariant == GradientVariant::residual) v = add_rn(v, residual);
    return {Fn::backward(dy, v, param), centered};
  }
}

// The operands of a batch that are read: input, dy, and a residual that was added before the activation.
template <class T, GradientVariant kVariant, class B>
struct GradientInputs {
  static constexpr bool kResidual = kVariant == GradientVariant::residual;
  Vector<T, B::V> input[B::U], dy[B::U], residual[kResidual ? B::U : 1];

  // The residual is operand kOperand. Reduce and backward have the same places of input and dy.
  template <CacheHint kHint, int kOperand>
  __device__ __forceinline__ void load(const B& batch, const BnBackwardArgs& from) {
    batch.template load<kHint>(input, from.input, BackwardStrides::input);
    batch.template load<kHint>(dy, from.dy, BackwardStrides::dy);
    if constexpr (kResidual) batch.template load<kHint>(residual, from.residual, kOperand);
  }
  __device__ __forceinline__ GradientInputs<T, kVariant, typename B::Single> vector(int j) const {
    return {{input[j]}, {dy[j]}, {residual[kResidual ? j : 0]}};
  }
};

// Adds a batch to the thread's sums of dv and dv * centred; at(j) reads its j-th vector. The branch on the
// activation is inside the loop over vectors, here and below, which takes fewer registers than outside.
template <class T, bool kIsRows, GradientVariant kVariant, class B, class A, int K, class At>
__device__ __forceinline__ void accumulate_sums(KahanSums<A> (&running)[K], const B&,
                                                const GradientConstants<A, kVariant> (&constants)[K],
                                                const BnBackwardArgs& args, A limit, const At& at) {
  GradientSums<A> sums[K];
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    dispatch_activation_for<T, kVariant != GradientVariant::from_output>(args.activation, [&]<class Fn>(Fn) {
      const GradientInputs<T, kVariant, typename B::Single> inputs = at(j);
      A in[B::V], g[B::V];
      [[maybe_unused]] A r[B::V];
      inputs.input[0].unpack(in);
      inputs.dy[0].unpack(g);
      if constexpr (inputs.kResidual) inputs.residual[0].unpack(r);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {  // elements past the end have dy = 0
        const ElementGradient<A> t =
            gradient_of<Fn, kVariant>(in[k], g[k], inputs.kResidual ? r[k] : A(0), constants[kIsRows ? k : 0],
                                      A(args.activation_param), limit);
        GradientSums<A>& sum = sums[kIsRows ? k : 0];
        sum.dv = add_rn(sum.dv, t.dv);
        sum.dv_second = fma_rn(t.dv, t.second_factor, sum.dv_second);
      }
    });
#pragma unroll
  for (int k = 0; k < K; ++k) running[k].add(sums[k]);
}

// The terms of a channel's sums over all ranks: dx = scale * (dv - offset - slope * centred).
template <class A>
struct StatisticsCorrection {
  A mean_dv, slope;

  template <GradientVariant kVariant>
  __device__ __forceinline__ static StatisticsCorrection of(const BnBackwardArgs& args, int64_t c,
                                                            const GradientSums<A>& sums) {
    const A n = saved_count<A>(args);
    if (!(n > 0)) return {0, 0};
    return {sums.dv / n, sums.dv_second / n *
                             (kVariant == GradientVariant::from_output ? A(1) : saved_invstd<A>(args, c))};
  }
};

// Writes a batch's dx and, where there is a residual, dresidual, which is dv; in `inputs` they take the place
// of input and dy.
template <bool kIsRows, GradientVariant kVariant, class T, class B, class A, int K>
__device__ __forceinline__ void write_gradients(const B& batch, GradientInputs<T, kVariant, B>& inputs,
                                                const GradientConstants<A, kVariant> (&constants)[K],
                                                const StatisticsCorrection<A> (&correction)[K],
                                                const BnBackwardArgs& args, A limit) {
  constexpr bool kResidual = GradientInputs<T, kVariant, B>::kResidual;
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    dispatch_activation_for<T, kVariant != GradientVariant::from_output>(args.activation, [&]<class Fn>(Fn) {
      A in[B::V], g[B::V];
      [[maybe_unused]] A r[B::V];
      inputs.input[j].unpack(in);
      inputs.dy[j].unpack(g);
      if constexpr (kResidual) inputs.residual[j].unpack(r);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {
        const int i = kIsRows ? k : 0;
        const ElementGradient<A> t = gradient_of<Fn, kVariant>(in[k], g[k], kResidual ? r[k] : A(0),
                                                               constants[i], A(args.activation_param), limit);
        const A rest = add_rn(t.dv, -correction[i].mean_dv);
        in[k] = constants[i].scale * fma_rn(-t.second_factor, correction[i].slope, rest);
        g[k] = t.dv;
      }
      inputs.input[j].pack(in);
      if constexpr (kResidual) inputs.dy[j].pack(g);
    });
  batch.store(inputs.input, args.dx, BackwardStrides::dx);
  if constexpr (kResidual) batch.store(inputs.dy, args.dresidual, BackwardStrides::dresidual);
}

// f.template operator()<kVariant>() for the op's variant.
template <class F>
auto dispatch_variant(const BnBackwardArgs& args, const F& f) {
  if (args.from_output) return f.template operator()<GradientVariant::from_output>();
  if (args.residual) return f.template operator()<GradientVariant::residual>();
  return f.template operator()<GradientVariant::plain>();
}

}  // namespace fastvit
