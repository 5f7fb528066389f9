// Shared by the forward kernels: from a channel's moments to y, `saved` and the running statistics.
#pragma once

#include <cmath>

#include "../batch_norm.h"
#include "activations.cuh"
#include "channel_vector.cuh"
#include "walk.cuh"

namespace fastvit {

template <class A>
struct MeanInvstd {
  A mean, invstd;

  template <class Count>
  __device__ __forceinline__ static MeanInvstd from_moments(const Moments<A, Count>& all, double eps) {
    const A variance = all.count == 0 ? A(0) : all.m2 / A(all.count);  // NaN after a failed exchange
    return {all.mean, A(1) / std::sqrt(variance + A(eps))};
  }
  __device__ __forceinline__ static MeanInvstd from_running_stats(const BnForwardArgs& args, int64_t c) {
    return {load_channel(args.running_mean, c, A(0)),
            A(1) / std::sqrt(load_channel(args.running_var, c, A(1)) + A(args.eps))};
  }
  __device__ __forceinline__ void save(const BnForwardArgs& args, int64_t c) const {
    A* const saved = static_cast<A*>(args.saved);
    saved[c] = mean;
    saved[args.layout.channels + c] = invstd;
  }
};

template <class A>
__device__ __forceinline__ void update_running(const BnForwardArgs& args, int64_t c, const Moments<A>& all,
                                               double factor) {
  if (!args.running_mean.data || !(all.count > 0)) return;
  const double unbiased = double(all.m2) / (all.count > 2 ? all.count - 1 : 1);
  const double old_mean = load_channel(args.running_mean, c, 0.0),
               old_var = load_channel(args.running_var, c, 1.0);
  store_channel(args.running_mean, c, old_mean + factor * (double(all.mean) - old_mean));
  store_channel(args.running_var, c, old_var + factor * (unbiased - old_var));
}

// y = act((x - mean) * scale + beta (+ residual)), scale = gamma * invstd, for the channels of a tile. The
// mean is subtracted first, so a mean much larger than the deviation loses no digits.
template <class A>
struct ChannelAffine {
  A mean, scale, beta;

  __device__ __forceinline__ static ChannelAffine of(const BnForwardArgs& args, int64_t c,
                                                     const MeanInvstd<A>& n) {
    const A beta = load_channel(args.bias, c, A(0)), gamma = load_channel(args.weight, c, A(1));
    const auto floor = gamma_floor<A>(args.invertible, args.dtype);
    return {n.mean, (args.invertible ? effective_gamma(gamma, beta, floor) : gamma) * n.invstd, beta};
  }
};

// Overwrites x of a batch with y.
template <bool kIsRows, bool kResidual, class B, class T, int K, int R>
__device__ __forceinline__ void normalize_batch(const BnForwardArgs& args, const B&,
                                                Vector<T, B::V> (&x)[B::U],
                                                const Vector<T, B::V> (&residual)[R],
                                                const ChannelAffine<Accumulation<T>> (&affine)[K]) {
  using A = Accumulation<T>;
  dispatch_activation_for<T, true>(args.activation, [&]<class Fn>(Fn) {
#pragma unroll
    for (int j = 0; j < B::U; ++j) {
      A v[B::V];
      [[maybe_unused]] A r[B::V];
      x[j].unpack(v);
      if constexpr (kResidual) residual[j].unpack(r);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {
        const ChannelAffine<A>& a = affine[kIsRows ? k : 0];
        v[k] = fma_rn(v[k] - a.mean, a.scale, a.beta);
        if constexpr (kResidual) v[k] = add_rn(v[k], r[k]);
        v[k] = Fn::forward(v[k], A(args.activation_param));
      }
      x[j].pack(v);
    }
  });
}

}  // namespace fastvit
