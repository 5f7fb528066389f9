// A thread's share of the statistics, as bn_stats and the local forward gather it.
//
// Values are summed in groups of 32, relative to the first of the group: sum of d and of d * d, then
// m2 = squares - sum * sum / n. As that first value is one of the n, at most n - 1 parts of n cancel: one or
// two digits, however far out it lies, for four instructions an element where two passes over registers take
// five, and one joining for 32 values. Values may lie 1e18 apart before a float's square overflows. Groups
// join by Chan's update, with a reciprocal that is good to 2 ulp. Means are kept relative to the channel's
// first value, the pivot: of the size of the deviations, they merge without loss however large the mean is.
#pragma once

#include "block_reduce.cuh"

namespace fastvit {

__device__ __forceinline__ float quotient(float a, float b) {
  return __fdividef(a, b);
}
__device__ __forceinline__ double quotient(double a, double b) {
  return a / b;
}

constexpr int kGroup = 32;

template <class T, bool kRows, int V>
struct ThreadStats {  // rows: one channel per column; planes: one
  using A = Accumulation<T>;
  static constexpr int K = kRows ? V : 1;
  WelfordState<A> spread[K];  // of the groups that are complete, or all of them after close()

  __device__ __forceinline__ ThreadStats(const Plan& plan, const Work& work, const T* x) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      pivot[k] = pivot_of(plan, x, work.first_channel(plan) + (kRows ? work.channel<V>(plan, k) : 0));
  }
  __device__ __forceinline__ static A pivot_of(const Plan& plan, const T* x, int64_t c) {
    return plan.layout.N > 0 ? A(x[c * plan.layout.strides[0].channel]) : A(0);
  }

  // The first packet of a batch always exists.
  template <class B>
  __device__ __forceinline__ void add(const B& batch, const Packet<T, B::V> (&x)[B::U]) {
    A value[B::V];
    if (group == 0) {
      x[0].unpack(value);
#pragma unroll
      for (int k = 0; k < K; ++k) first[k] = value[k], sum[k] = squares[k] = 0;
    }
#pragma unroll
    for (int j = 0; j < B::U; ++j)
      if (batch.exists[j]) {
        x[j].unpack(value);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {
          const int i = kRows ? k : 0;
          const A d = value[k] - first[i];
          sum[i] += d;
          squares[i] = fused(d, d, squares[i]);
        }
      }
    group += batch.packets() * (kRows ? 1 : B::V);
    if (group >= kGroup) close();
  }

  __device__ __forceinline__ void close() {
    if (group == 0) return;
    const A n = A(group), one_over_n = quotient(A(1), n);
    const A count = spread[0].count, total = count + n, share = quotient(n, total), weight = count * share;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A d = sum[k] * one_over_n, delta = added(first[k] - pivot[k], d) - spread[k].mean;
      spread[k].count = total;  // the same in all columns
      spread[k].mean = fused(delta, share, spread[k].mean);
      spread[k].m2 = added(spread[k].m2, fused(delta * delta, weight, fused(-sum[k], d, squares[k])));
    }
    group = 0;
  }

 private:
  A pivot[K], first[K], sum[K], squares[K];
  int group = 0;  // values in it
};

}  // namespace fastvit
