// bn_forward, bn_apply, abn_forward_: y = act((x - mean) * scale + beta (+ z)), scale = gamma * invstd; the
// ranks' moments are merged and the running statistics updated in the same launch. Memory   reads x (and z)
// once, writes y once, over x or to a tensor of its own. Bandwidth-bound. Mapping  block 0 keeps the books
// (saved, running statistics, counter) for all channels; the others take
//          (tile of channels, slice of their values), see plan.h, and merge the moments of their tile
//          themselves. 16-byte loads and stores, a batch in flight.
// Numerics the mean is taken off first, so a mean much larger than the deviation costs no digits.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include <cmath>

#include "host.h"
#include "walk.cuh"

namespace fastvit {

template <class A>
struct Statistics {  // what mean and invstd come from, and where they are kept
  int64_t C;
  const A* moments;  // [ranks][2C + 2]; null: the running statistics
  int64_t ranks;
  const A* given;  // [2C + 2] of an earlier forward, or null; then there is nothing to keep
  PerChannel running_mean, running_var;
  int64_t* num_batches_tracked;
  bool cumulative;
  double momentum;
  A eps;
  A* saved;

  __device__ __forceinline__ Moments<A> merged(int64_t c) const {  // in rank order
    Moments<A> all;
    for (int64_t r = 0; r < ranks; ++r) {
      const A* rank = moments + r * (2 * C + 2);
      all.merge(load_count(rank + 2 * C), rank[c], rank[C + c]);
    }
    return all;
  }

  struct Normaliser {
    A mean, invstd;
  };
  __device__ __forceinline__ Normaliser normaliser(const Moments<A>& all) const {
    const A variance = all.count > 0 ? A(double(all.m2) / all.count) : A(0);
    return {all.mean, A(1) / std::sqrt(variance + eps)};
  }
  __device__ __forceinline__ Normaliser normaliser(int64_t c) const {
    if (given) return {given[c], given[C + c]};
    if (moments) return normaliser(merged(c));
    return {A(running_mean.read(c, 0)), A(1) / std::sqrt(A(running_var.read(c, 1)) + eps)};
  }

  // By one block for all channels: the factor comes from a counter that must change exactly once, after
  // everybody has read it.
  __device__ __forceinline__ void keep() const {
    if (given) return;
    double count = 0, factor = momentum;
    if (moments) {
      for (int64_t r = 0; r < ranks; ++r) count += load_count(moments + r * (2 * C + 2) + 2 * C);
      if (num_batches_tracked && cumulative) factor = 1.0 / double(*num_batches_tracked + 1);
    }
    for (int64_t c = threadIdx.x; c < C; c += kThreads) {
      Normaliser n;
      if (moments) {
        const Moments<A> all = merged(c);
        n = normaliser(all);
        if (running_mean.data && count > 0) {
          const double unbiased = double(all.m2) / (count > 2 ? count - 1 : 1);
          const double old_mean = running_mean.read(c, 0), old_var = running_var.read(c, 1);
          running_mean.write(c, old_mean + factor * (double(all.mean) - old_mean));
          running_var.write(c, old_var + factor * (unbiased - old_var));
        }
      } else {
        n = normaliser(c);
      }
      saved[c] = n.mean;
      saved[C + c] = n.invstd;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (moments) {
        store_count(saved + 2 * C, count);
        if (num_batches_tracked) ++*num_batches_tracked;
      } else {
        saved[2 * C] = A(INFINITY);
        saved[2 * C + 1] = 0;
      }
    }
  }
};

template <class T>
struct ForwardKernel {
  using A = Accumulation<T>;
  Plan plan;
  const T* x;
  T* y;
  const T* z;
  Statistics<A> statistics;
  PerChannel weight, bias;
  A floor;
  Activation activation;
  A param;
};

// Operands 0: x, 1: y, 2: z.
template <class T, bool kRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResident)
    forward_kernel(const __grid_constant__ ForwardKernel<T> args) {
  using A = Accumulation<T>;
  if (blockIdx.x == 0) {
    args.statistics.keep();
    return;
  }
  constexpr int kOperands = kResidual ? 3 : 2, K = kRows ? V : 1, kTile = kRows ? kMostTile : 1;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ A means[kTile], scales[kTile], betas[kTile];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    const auto n = args.statistics.normaliser(c);
    means[g] = n.mean;
    scales[g] = gamma_of(args.weight, args.floor, c) * n.invstd;
    betas[g] = A(args.bias.read(c, 0));
  }
  __syncthreads();
  A mean[K], scale[K], beta[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int g = kRows ? work.channel<V>(args.plan, k) : 0;
    mean[k] = means[g], scale[k] = scales[g], beta[k] = betas[g];
  }

  const auto body = [&]<class B>(const B& batch) {
    Packet<T, B::V> x[B::U];
    [[maybe_unused]] Packet<T, B::V> z[kResidual ? B::U : 1];
    batch.load(x, args.x, 0);
    if constexpr (kResidual) batch.load(z, args.z, 2);
    with_activation<true>(args.activation, [&]<class Fn>(Fn) {
#pragma unroll
      for (int j = 0; j < B::U; ++j) {
        A v[B::V];
        [[maybe_unused]] A r[B::V];
        x[j].unpack(v);
        if constexpr (kResidual) z[j].unpack(r);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {
          v[k] = (v[k] - mean[kRows ? k : 0]) * scale[kRows ? k : 0] + beta[kRows ? k : 0];
          if constexpr (kResidual) v[k] += r[k];
          v[k] = Fn::forward(v[k], args.param);
        }
        x[j].pack(v);
      }
    });
    batch.store(x, args.y, 1);
  };
  if constexpr (kRows)
    walk_rows<V, kBatch, kOperands, true>(args.plan, work, body);
  else
    walk_planes<V, kBatch, kOperands, true>(args.plan, work, args.x, body);
}

void Cuda::forward(const ForwardArgs& args) {
  const Device device(args.device);
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.z};
    const Plan plan =
        Planner::make(args.layout, pointers, args.z ? 3 : 2, sizeof(T), device.multiprocessors, false);
    ForwardKernel<T> kernel{};
    kernel.plan = plan;
    kernel.x = static_cast<const T*>(args.x);
    kernel.y = static_cast<T*>(args.y);
    kernel.z = static_cast<const T*>(args.z);
    kernel.statistics = {args.layout.C,
                         static_cast<const A*>(args.moments),
                         args.ranks,
                         static_cast<const A*>(args.given),
                         per_channel(args.running_mean),
                         per_channel(args.running_var),
                         args.num_batches_tracked,
                         args.cumulative,
                         args.momentum,
                         A(args.eps),
                         static_cast<A*>(args.saved)};
    kernel.weight = per_channel(args.weight);
    kernel.bias = per_channel(args.bias);
    kernel.floor = A(gamma_floor(args.in_place, args.dtype));
    kernel.activation = args.activation;
    kernel.param = A(args.activation_param);
    const int64_t blocks = 1 + (args.layout.numel() > 0 ? plan.blocks() : 0);
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      if (args.z)
        STD_CUDA_CHECK(launch(forward_kernel<T, kRows, V, true>, blocks, device.stream, kernel));
      else
        STD_CUDA_CHECK(launch(forward_kernel<T, kRows, V, false>, blocks, device.stream, kernel));
    });
  });
}

}  // namespace fastvit
