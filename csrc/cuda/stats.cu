// bn_stats: mean, M2 (sum of squared deviations) and the count of values, per channel.
// Memory   reads x once; writes 2C + 2 numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics every batch is summed in two passes over registers, mean then squared deviations, and joins what
//          came before by Chan's update: no sum of squares, no shift to guess. fp32 (fp64 for double), fixed
//          order, no float atomics.
// Source   Chan, Golub, LeVeque (1979), see moments.h.
#include "block_reduce.cuh"
#include "host.h"

namespace fastvit {

template <class T>
struct StatsKernel {
  using A = Accumulation<T>;
  Plan plan;
  const T* x;
  A* moments;
  double count;
  Spread<A>* partial;
  unsigned* tickets;
};

// Planes: all elements of a batch belong to one channel.
template <class T, int V, class Batch>
__device__ __forceinline__ void add_batch(Spread<Accumulation<T>> (&spread)[1], const Batch& batch,
                                          const Packet<T, V> (&x)[kBatch]) {
  using A = Accumulation<T>;
  A value[kBatch][V], sum = 0, m2 = 0;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    x[j].unpack(value[j]);
#pragma unroll
    for (int k = 0; k < V; ++k) sum += value[j][k];  // what does not exist was loaded as 0
  }
  const int n = batch.count();
  const A mean = sum / A(n);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (batch.last[j] - batch.first[j] == V) {
#pragma unroll
      for (int k = 0; k < V; ++k) m2 += (value[j][k] - mean) * (value[j][k] - mean);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k)
        if (k >= batch.first[j] && k < batch.last[j]) m2 += (value[j][k] - mean) * (value[j][k] - mean);
    }
  }
  spread[0].merge(A(n), mean, m2);
}

// Rows: every column of the batch is a channel of its own, with as many values as rows exist.
template <class T, int V, class Batch>
__device__ __forceinline__ void add_rows(Spread<Accumulation<T>> (&spread)[V], const Batch& batch,
                                         const Packet<T, V> (&x)[kBatch]) {
  using A = Accumulation<T>;
  A value[kBatch][V];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) x[j].unpack(value[j]);
  const A n = A(batch.count() / V), one_over_n = A(1) / n;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    A sum = 0, m2 = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum += value[j][k];
    const A mean = sum * one_over_n;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const A d = batch.last[j] ? value[j][k] - mean : A(0);
      m2 += d * d;
    }
    spread[k].merge(n, mean, m2);
  }
}

template <class T, bool kRows, int V>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ StatsKernel<T> args) {
  using A = Accumulation<T>;
  constexpr int K = kRows ? V : 1;
  const Work work(args.plan, blockIdx.x);
  Spread<A> spread[K];
  const auto body = [&](const auto& batch) {
    Packet<T, V> x[kBatch];
    batch.load(x, args.x, 0);
    if constexpr (kRows)
      add_rows(spread, batch, x);
    else
      add_batch(spread, batch, x);
  };
  if constexpr (kRows)
    walk_rows<V, 1>(args.plan, work, body);
  else
    walk_planes<V, 1>(args.plan, work, args.x, body);

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Spread<A>)];
  Spread<A>* shared = reinterpret_cast<Spread<A>*>(bytes);
  const int step = merge_block(shared, spread, args.plan, work);
  const int64_t C = args.plan.layout.C;
  finish(shared, step, args.partial, args.tickets, args.plan, work, [&](int64_t c, const Spread<A>& total) {
    args.moments[c] = total.mean;
    args.moments[C + c] = total.m2;
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) store_count(args.moments + 2 * C, args.count);
}

void Cuda::stats(const StatsArgs& args) {
  const Device device(args.device);
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x};
    const Plan plan = Planner::make(args.layout, pointers, 1, sizeof(T), device.multiprocessors, true);
    const Slices<Spread<A>> slices(plan, device);
    const StatsKernel<T> kernel{plan,           static_cast<const T*>(args.x),
                                static_cast<A*>(args.moments), double(args.layout.count()),
                                slices.partial(), slices.tickets()};
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      STD_CUDA_CHECK(launch(stats_kernel<T, kRows, V>, plan.blocks(), device.stream, kernel));
    });
  });
}

}  // namespace fastvit
