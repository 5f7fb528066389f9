// Shared by the forward kernels: from a channel's moments to y, `saved` and the running statistics.
//
// The moments of a channel are its mean, M2 (the sum of squared deviations from the mean) and its number of
// values. `saved` is the tensor that backward needs: mean[C], invstd[C], and the count as two numbers, a high
// and a low part, so that a large count is exact in float (pack_count). If args.invertible is set, |gamma| is
// raised to a floor (gamma_floor), so that backward can recover x from y.
//
// A: type of the arithmetic and of `saved`, double for tensors of double and float for all others.
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

  // Count: A or double. A failed exchange between ranks makes the count NaN, and with it invstd and y.
  template <class Count>
  __device__ __forceinline__ static MeanInvstd from_moments(const Moments<A, Count>& moments, double eps) {
    const A variance = moments.count == 0 ? A(0) : moments.m2 / A(moments.count);
    return {moments.mean, A(1) / std::sqrt(variance + A(eps))};
  }
  __device__ __forceinline__ static MeanInvstd from_running_stats(const BnForwardArgs& args, int64_t c) {
    return {load_channel(args.running_mean, c, A(0)),
            A(1) / std::sqrt(load_channel(args.running_var, c, A(1)) + A(args.eps))};
  }
  // Writes channel c of `saved`.
  __device__ __forceinline__ void save(const BnForwardArgs& args, int64_t c) const {
    A* const saved = static_cast<A*>(args.saved);
    saved[c] = mean;
    saved[args.layout.channels + c] = invstd;
  }
};

// Moves the running statistics of channel c by average_factor (torch's momentum) towards the moments. A count
// of 0 or NaN leaves them as they are.
template <class A>
__device__ __forceinline__ void update_running_stats(const BnForwardArgs& args, int64_t c,
                                                     const Moments<A>& moments, double average_factor) {
  if (!args.running_mean.data || !(moments.count > 0)) return;
  const double unbiased_var = double(moments.m2) / (moments.count > 2 ? moments.count - 1 : 1);
  const double old_mean = load_channel(args.running_mean, c, 0.0),
               old_var = load_channel(args.running_var, c, 1.0);
  store_channel(args.running_mean, c, old_mean + average_factor * (double(moments.mean) - old_mean));
  store_channel(args.running_var, c, old_var + average_factor * (unbiased_var - old_var));
}

// The constants of a channel in y = act((x - mean) * scale + beta (+ residual)), scale = gamma * invstd. The
// mean is subtracted first, so a mean much larger than the deviations loses no digits.
template <class A>
struct ChannelAffine {
  A mean, scale, beta;

  __device__ __forceinline__ static ChannelAffine load(const BnForwardArgs& args, int64_t c,
                                                       const MeanInvstd<A>& mean_invstd) {
    const A beta = load_channel(args.bias, c, A(0)), gamma = load_channel(args.weight, c, A(1));
    // effective_gamma raises |gamma| to a floor. For float and double the floor grows with |beta|, because
    // the rounding error of y does.
    const auto floor = gamma_floor<A>(args.invertible, args.dtype);
    return {mean_invstd.mean,
            (args.invertible ? effective_gamma(gamma, beta, floor) : gamma) * mean_invstd.invstd, beta};
  }
};

// Overwrites a thread's batch of x, in registers, with y. B: type of the batch, of B::U vectors of B::V
// elements. kIsRows: element k of every vector is of the thread's column k, which has thread_affine[k].
// Otherwise (planes) all elements are of one channel, which has thread_affine[0].
template <bool kIsRows, bool kHasResidual, class B, class T, int kThreadChannels, int kResidualVectors>
__device__ __forceinline__ void normalize_batch(
    const BnForwardArgs& args, const B&, Vector<T, B::V> (&x)[B::U],
    const Vector<T, B::V> (&residual)[kResidualVectors],
    const ChannelAffine<Accumulation<T>> (&thread_affine)[kThreadChannels]) {
  using A = Accumulation<T>;
  dispatch_activation_for<T, /*kIncludesNonInvertible=*/true>(args.activation, [&]<class Act>(Act) {
#pragma unroll
    for (int j = 0; j < B::U; ++j) {
      A values[B::V];
      [[maybe_unused]] A residual_values[B::V];
      x[j].unpack(values);
      if constexpr (kHasResidual) residual[j].unpack(residual_values);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {
        const ChannelAffine<A>& affine = thread_affine[kIsRows ? k : 0];
        values[k] = fma_rn(values[k] - affine.mean, affine.scale, affine.beta);
        if constexpr (kHasResidual) values[k] = add_rn(values[k], residual_values[k]);
        values[k] = Act::forward(values[k], A(args.activation_param));
      }
      x[j].pack(values);
    }
  });
}

}  // namespace fastvit
