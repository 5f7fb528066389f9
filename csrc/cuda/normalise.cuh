// Shared by the forward kernels: from a channel's moments to y, `saved` and the running statistics.
#pragma once

#include <cmath>

#include "../moments.h"
#include "activations.cuh"
#include "channels.cuh"
#include "walk.cuh"

namespace fastvit {

template <class A>
struct Normaliser {
  A mean, invstd;
};

template <class A>
struct RunningStats {  // the running statistics, and `saved` for backward
  int64_t C;
  ChannelArray running_mean, running_var;
  int64_t* num_batches_tracked;
  bool cumulative;
  double momentum;
  A eps;
  A* saved;

  template <class Count>
  __device__ __forceinline__ Normaliser<A> normaliser(const Moments<A, Count>& all) const {
    const A variance = all.count == 0 ? A(0) : all.m2 / A(all.count);  // NaN after a failed exchange
    return {all.mean, A(1) / std::sqrt(variance + eps)};
  }
  __device__ __forceinline__ Normaliser<A> running(int64_t c) const {
    return {running_mean.read(c, A(0)), A(1) / std::sqrt(running_var.read(c, A(1)) + eps)};
  }

  __device__ __forceinline__ void update(int64_t c, const Moments<A>& all, double factor) const {
    if (!running_mean.data || !(all.count > 0)) return;
    const double unbiased = double(all.m2) / (all.count > 2 ? all.count - 1 : 1);
    const double old_mean = running_mean.read(c, 0.0), old_var = running_var.read(c, 1.0);
    running_mean.write(c, old_mean + factor * (double(all.mean) - old_mean));
    running_var.write(c, old_var + factor * (unbiased - old_var));
  }
  __device__ __forceinline__ void save(int64_t c, const Normaliser<A>& n) const {
    saved[c] = n.mean;
    saved[C + c] = n.invstd;
  }
};

// y = act((x - mean) * scale + beta (+ z)), scale = gamma * invstd, for the channels of a tile. The mean is
// subtracted first, so a mean much larger than the deviation loses no digits.
template <class A>
struct Affine {
  A mean, scale, beta;
};

template <class T>
struct Activated {  // parameters and activation
  ChannelArray weight, bias;
  GammaFloor<Accumulation<T>> floor;
  Activation activation;
  Accumulation<T> param;

  __device__ __forceinline__ Affine<Accumulation<T>> affine(int64_t c,
                                                            const Normaliser<Accumulation<T>>& n) const {
    using A = Accumulation<T>;
    const A beta = bias.read(c, A(0)), gamma = weight.read(c, A(1));
    return {n.mean, (floor.absolute > 0 ? effective_gamma(gamma, beta, floor) : gamma) * n.invstd, beta};
  }

  // Overwrites x of a batch with y.
  template <Activations kSet, bool kRows, bool kResidual, class B, int K, int Z>
  __device__ __forceinline__ void apply(const B&, Vector<T, B::V> (&x)[B::U], const Vector<T, B::V> (&z)[Z],
                                        const Affine<Accumulation<T>> (&affine)[K]) const {
    using A = Accumulation<T>;
    with_activation<T, kSet, true>(activation, [&]<class Fn>(Fn) {
#pragma unroll
      for (int j = 0; j < B::U; ++j) {
        A v[B::V];
        [[maybe_unused]] A r[B::V];
        x[j].unpack(v);
        if constexpr (kResidual) z[j].unpack(r);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {
          const Affine<A>& a = affine[kRows ? k : 0];
          v[k] = fused(v[k] - a.mean, a.scale, a.beta);
          if constexpr (kResidual) v[k] = added(v[k], r[k]);
          v[k] = Fn::forward(v[k], param);
        }
        x[j].pack(v);
      }
    });
  }
};

// The statistics' part of a forward kernel's arguments.
template <class A>
RunningStats<A> running_stats_of(const ForwardArgs& args) {
  return {args.layout.C,
          per_channel(args.running_mean),
          per_channel(args.running_var),
          args.num_batches_tracked,
          args.cumulative,
          args.momentum,
          A(args.eps),
          static_cast<A*>(args.saved)};
}

template <class T>
Activated<T> activated_of(const ForwardArgs& args) {
  using A = Accumulation<T>;
  return {per_channel(args.weight), per_channel(args.bias), gamma_floor<A>(args.in_place, args.dtype),
          args.activation, A(args.activation_param)};
}

}  // namespace fastvit
