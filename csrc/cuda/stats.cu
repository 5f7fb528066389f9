// bn_stats: mean, M2 (sum of squared deviations) and the count of values, per channel.
// Memory   reads x once; writes 2C + 2 numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics every batch is summed in two passes over registers, mean then squared deviations, and joins what
//          came before by Chan's update: no sum of squares. Means are kept relative to the channel's first
//          value, the pivot: of the size of the deviations, they merge without loss however large the mean
//          is; and no value lies further from a pivot that is itself a value than the deviation allows.
//          fp32 (fp64 for double), fixed order, no float atomics.
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
template <class B, class T>
__device__ __forceinline__ void add_packets(Spread<Accumulation<T>>& spread, Accumulation<T> pivot,
                                            const B& batch, const Packet<T, B::V> (&x)[B::U]) {
  using A = Accumulation<T>;
  A value[B::U][B::V], sum = 0, m2 = 0;
#pragma unroll
  for (int j = 0; j < B::U; ++j) {
    x[j].unpack(value[j]);
#pragma unroll
    for (int k = 0; k < B::V; ++k) {
      value[j][k] = batch.exists[j] ? value[j][k] - pivot : A(0);
      sum += value[j][k];
    }
  }
  const A n = A(batch.packets() * B::V), mean = sum / n;
#pragma unroll
  for (int j = 0; j < B::U; ++j)
#pragma unroll
    for (int k = 0; k < B::V; ++k) {
      const A deviation = batch.exists[j] ? value[j][k] - mean : A(0);
      m2 += deviation * deviation;
    }
  spread.merge(n, mean, m2);
}

// Rows: every column of the batch has as many values as rows exist.
template <class B, class T>
__device__ __forceinline__ void add_rows(Spread<Accumulation<T>> (&spread)[B::V],
                                         const Accumulation<T> (&pivot)[B::V], const B& batch,
                                         const Packet<T, B::V> (&x)[B::U]) {
  using A = Accumulation<T>;
  A value[B::U][B::V];
#pragma unroll
  for (int j = 0; j < B::U; ++j) x[j].unpack(value[j]);
  const A n = A(batch.packets()), one_over_n = A(1) / n;
#pragma unroll
  for (int k = 0; k < B::V; ++k) {
    A sum = 0, m2 = 0;
#pragma unroll
    for (int j = 0; j < B::U; ++j) {
      value[j][k] = batch.exists[j] ? value[j][k] - pivot[k] : A(0);
      sum += value[j][k];
    }
    const A mean = sum * one_over_n;
#pragma unroll
    for (int j = 0; j < B::U; ++j) {
      const A deviation = batch.exists[j] ? value[j][k] - mean : A(0);
      m2 += deviation * deviation;
    }
    spread[k].merge(n, mean, m2);
  }
}

template <class T, bool kRows, int V>
__global__ void __launch_bounds__(kThreads, kResident)
    stats_kernel(const __grid_constant__ StatsKernel<T> args) {
  using A = Accumulation<T>;
  constexpr int K = kRows ? V : 1;
  const Work work(args.plan, blockIdx.x);
  const Layout& layout = args.plan.layout;
  const auto pivot_of = [&](int64_t c) {
    return layout.N > 0 ? A(args.x[c * layout.strides[0].channel]) : A(0);
  };
  Spread<A> spread[K];
  A pivot[K];
#pragma unroll
  for (int k = 0; k < K; ++k)
    pivot[k] = pivot_of(work.first_channel(args.plan) + (kRows ? work.channel<V>(args.plan, k) : 0));
  const auto body = [&]<class B>(const B& batch) {
    Packet<T, B::V> x[B::U];
    batch.load(x, args.x, 0);
    if constexpr (kRows)
      add_rows(spread, pivot, batch, x);
    else
      add_packets(spread[0], pivot[0], batch, x);
  };
  if constexpr (kRows)
    walk_rows<V, kBatch, 1, false>(args.plan, work, body);
  else
    walk_planes<V, kBatch, 1, false>(args.plan, work, args.x, body);

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Spread<A>)];
  Spread<A>* shared = reinterpret_cast<Spread<A>*>(bytes);
  const int step = merge_block(shared, spread, args.plan, work);
  const int64_t C = layout.C;
  finish(shared, step, args.partial, args.tickets, args.plan, work, [&](int64_t c, const Spread<A>& total) {
    args.moments[c] = pivot_of(c) + total.mean;
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
    const StatsKernel<T> kernel{plan,
                                static_cast<const T*>(args.x),
                                static_cast<A*>(args.moments),
                                double(args.layout.count()),
                                slices.partial(),
                                slices.tickets};
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      STD_CUDA_CHECK(launch(stats_kernel<T, kRows, V>, plan.blocks(), device.stream, kernel));
    });
  });
}

}  // namespace fastvit
