// A thread's share of the statistics, as bn_stats and the local forward gather it.
//
// Every batch is summed in two passes over registers, mean then squared deviations, and joins what came
// before by Chan's update: no sum of squares. Means are kept relative to the channel's first value, the
// pivot: of the size of the deviations, they merge without loss however large the mean is; and no value lies
// further from a pivot that is itself a value than the deviation allows.
#pragma once

#include "block_reduce.cuh"

namespace fastvit {

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
struct Measured {  // rows: one channel per column; planes: one
  using A = Accumulation<T>;
  static constexpr int K = kRows ? V : 1;
  Spread<A> spread[K];
  A pivot[K];

  __device__ __forceinline__ Measured(const Plan& plan, const Work& work, const T* x) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      pivot[k] = pivot_of(plan, x, work.first_channel(plan) + (kRows ? work.channel<V>(plan, k) : 0));
  }
  __device__ __forceinline__ static A pivot_of(const Plan& plan, const T* x, int64_t c) {
    return plan.layout.N > 0 ? A(x[c * plan.layout.strides[0].channel]) : A(0);
  }
  template <class B>
  __device__ __forceinline__ void add(const B& batch, const Packet<T, B::V> (&x)[B::U]) {
    if constexpr (kRows)
      add_rows(spread, pivot, batch, x);
    else
      add_packets(spread[0], pivot[0], batch, x);
  }
};

}  // namespace fastvit
