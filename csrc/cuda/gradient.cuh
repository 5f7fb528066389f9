// Shared by reduce and backward: the gradient before the activation, dz, and its factor in the second sum,
// `centred`.
//
//   from x    centred = x - mean; v = centred * scale + beta (+ z), with the bits of the forward pass, so
//             that the activation is on the same side of its kink; dz = dy * act'(v)
//   in place  centred = xhat, recovered from y; dz = dy * act'(v) from y
#pragma once

#include <cmath>

#include "activations.cuh"
#include "backend.h"
#include "block_reduce.cuh"
#include "channels.cuh"

namespace fastvit {

enum class Source { input, input_and_residual, output };

template <class A>
struct Saved {  // `saved` of the forward pass, and the parameters
  int64_t C;
  const A* saved;  // mean[C], invstd[C], count
  ChannelArray weight, bias;
  GammaFloor<A> floor;
  Activation activation;
  A param;

  __device__ __forceinline__ A invstd(int64_t c) const { return saved[C + c]; }
  __device__ __forceinline__ A count() const { return load_count<A>(saved + 2 * C); }
  __device__ __forceinline__ A limit() const {  // largest |xhat|
    return std::sqrt(max(count() - 1, A(0)));
  }
};

// The constants of one channel; their meaning depends on the saved operand.
template <class A, Source kSource>
struct Constants {
  A mean_or_inverse_gamma, scale, beta;

  __device__ __forceinline__ static Constants of(const Saved<A>& s, int64_t c) {
    const A beta = s.bias.read(c, A(0));
    const A gamma = s.weight.read(c, A(1));  // the floor applies to the inversion only
    return {kSource == Source::output ? A(1) / effective_gamma(gamma, beta, s.floor) : s.saved[c],
            gamma * s.invstd(c), beta};
  }
};

template <class A>
struct Gradient {
  A dz, centred;
};

template <class Fn, Source kSource, class A>
__device__ __forceinline__ Gradient<A> gradient(A input, A dy, A z, const Constants<A, kSource>& k, A param,
                                                A limit) {
  if constexpr (kSource == Source::output) {
    return {Fn::backward_y(dy, input, param),
            recover_xhat(Fn::inverse(input, param), k.beta, k.mean_or_inverse_gamma, limit)};
  } else {
    const A centred = input - k.mean_or_inverse_gamma;
    A v = fused(centred, k.scale, k.beta);
    if constexpr (kSource == Source::input_and_residual) v = added(v, z);
    return {Fn::backward(dy, v, param), centred};
  }
}

// The operands of a batch that are read: x or y, dy, and z where a residual is added before the activation.
template <class T, Source kSource, class B>
struct Read {
  static constexpr bool kResidual = kSource == Source::input_and_residual;
  Vector<T, B::V> input[B::U], dy[B::U], z[kResidual ? B::U : 1];

  // z is operand kZ.
  template <Reading kReading, int kZ, class Params>
  __device__ __forceinline__ void load(const B& batch, const Params& from) {
    batch.template load<kReading>(input, from.input, 0);
    batch.template load<kReading>(dy, from.dy, 1);
    if constexpr (kResidual) batch.template load<kReading>(z, from.z, kZ);
  }
  __device__ __forceinline__ Read<T, kSource, typename B::One> vector(int j) const {
    return {{input[j]}, {dy[j]}, {z[kResidual ? j : 0]}};
  }
};

// Adds a batch to the thread's sums of dz and dz * centred; at(j) reads its j-th vector. The branch on the
// activation is inside the loop over vectors, here and below, which takes fewer registers than outside.
template <class T, Activations kSet, bool kRows, Source kSource, class B, class A, int K, class At>
__device__ __forceinline__ void add_gradients(RunningSums<A> (&running)[K], const B&,
                                              const Constants<A, kSource> (&constants)[K],
                                              const Saved<A>& saved, A limit, const At& at) {
  Sums<A> sums[K];
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    with_activation<T, kSet, kSource != Source::output>(saved.activation, [&]<class Fn>(Fn) {
      const Read<T, kSource, typename B::One> read = at(j);
      A in[B::V], g[B::V];
      [[maybe_unused]] A r[B::V];
      read.input[0].unpack(in);
      read.dy[0].unpack(g);
      if constexpr (read.kResidual) read.z[0].unpack(r);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {  // elements past the end have dy = 0
        const Gradient<A> t = gradient<Fn, kSource>(in[k], g[k], read.kResidual ? r[k] : A(0),
                                                    constants[kRows ? k : 0], saved.param, limit);
        Sums<A>& sum = sums[kRows ? k : 0];
        sum.first = added(sum.first, t.dz);
        sum.second = fused(t.dz, t.centred, sum.second);
      }
    });
#pragma unroll
  for (int k = 0; k < K; ++k) running[k].add(sums[k]);
}

// The terms of a channel's sums over all ranks: dx = scale * (dz - offset - slope * centred).
template <class A>
struct Correction {
  A offset, slope;

  template <Source kSource>
  __device__ __forceinline__ static Correction of(const Saved<A>& s, int64_t c, const Sums<A>& sums) {
    const A n = s.count();
    if (!(n > 0)) return {0, 0};
    return {sums.first / n, sums.second / n * (kSource == Source::output ? A(1) : s.invstd(c))};
  }
};

// Shared by the kernels of backward. Operands 0: x or y, 1: dy, 2: dx, 3: z, 4: dz.
template <class T>
struct Propagation {
  using A = Accumulation<T>;
  Plan plan;
  const T* input;
  const T* dy;
  T* dx;
  const T* z;
  T* dz;
  Saved<A> saved;
};

// Writes a batch's dx and, where there is a residual, dz; in `read` they take the place of input and dy.
template <Activations kSet, bool kRows, Source kSource, class T, class B, class A, int K>
__device__ __forceinline__ void propagate(const B& batch, Read<T, kSource, B>& read,
                                          const Constants<A, kSource> (&constants)[K],
                                          const Correction<A> (&correction)[K], const Propagation<T>& args,
                                          A limit) {
  constexpr bool kResidual = Read<T, kSource, B>::kResidual;
#pragma unroll
  for (int j = 0; j < B::U; ++j)
    with_activation<T, kSet, kSource != Source::output>(args.saved.activation, [&]<class Fn>(Fn) {
      A in[B::V], g[B::V];
      [[maybe_unused]] A r[B::V];
      read.input[j].unpack(in);
      read.dy[j].unpack(g);
      if constexpr (kResidual) read.z[j].unpack(r);
#pragma unroll
      for (int k = 0; k < B::V; ++k) {
        const int i = kRows ? k : 0;
        const Gradient<A> t = gradient<Fn, kSource>(in[k], g[k], kResidual ? r[k] : A(0), constants[i],
                                                    args.saved.param, limit);
        const A rest = added(t.dz, -correction[i].offset);
        in[k] = constants[i].scale * fused(-t.centred, correction[i].slope, rest);
        g[k] = t.dz;
      }
      read.input[j].pack(in);
      if constexpr (kResidual) read.dy[j].pack(g);
    });
  batch.store(read.input, args.dx, 2);
  if constexpr (kResidual) batch.store(read.dy, args.dz, 4);
}

// The saved values of a backward kernel, from ReduceArgs or BackwardArgs.
template <class A, class Args>
Saved<A> saved_of(const Args& args) {
  return {args.layout.C,           static_cast<const A*>(args.saved),         per_channel(args.weight),
          per_channel(args.bias),  gamma_floor<A>(args.in_place, args.dtype), args.activation,
          A(args.activation_param)};
}
template <class T>
Propagation<T> propagation_of(const BackwardArgs& args, const Plan& plan) {
  return {plan,
          static_cast<const T*>(args.input),
          static_cast<const T*>(args.dy),
          static_cast<T*>(args.dx),
          static_cast<const T*>(args.z),
          static_cast<T*>(args.dz),
          saved_of<Accumulation<T>>(args)};
}

// f.template operator()<kSource>() for the saved operands.
template <class Args, class F>
void with_source(const Args& args, const F& f) {
  if (args.in_place)
    f.template operator()<Source::output>();
  else if (args.z)
    f.template operator()<Source::input_and_residual>();
  else
    f.template operator()<Source::input>();
}

}  // namespace fastvit
