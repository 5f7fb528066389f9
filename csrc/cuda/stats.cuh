// A thread's share of the statistics, as bn_stats and the local forward gather it.
//
// Values are summed in groups of 32, relative to the first of the group: sum of d and of d * d, then
// m2 = squares - sum * sum / n. As that first value is one of the n, at most n - 1 parts of n cancel: one or
// two digits, however far out it lies, for four instructions an element where two passes over registers take
// five, and one joining for 32 values. Values may lie 1e18 apart before a float's square overflows. Groups
// join by Chan's update, with a reciprocal that is good to 2 ulp.
//
// A thread keeps its mean relative to the first value of its latest group, and moves it when a group begins;
// before threads merge, all means of a channel become relative to its first value in memory, the pivot. Of
// the size of the deviations, they move and merge without loss however large the mean is. The pivots are
// loaded when the kernel begins and needed when it ends, so nobody waits for them.
#pragma once

#include "block_reduce.cuh"

namespace fastvit {

constexpr int kGroup = 32;

template <class T, bool kRows, int V>
struct ThreadStats {  // rows: one channel per column; planes: one
  using A = Accumulation<T>;
  static constexpr int K = kRows ? V : 1;
  static constexpr int kTile = kRows ? kMostTile : 1;
  WelfordState<A> spread[K];  // of the groups that are complete, or all of them after end()

  __device__ __forceinline__ ThreadStats(const Plan& plan, const Work& work, const T* x) {
    static_assert(kTile <= kThreads);
    if (int(threadIdx.x) < work.channels(plan) && plan.layout.N > 0)
      pivot.load(x + (work.first_channel(plan) + threadIdx.x) * plan.layout.strides[0].channel);
    else
      pivot.clear();
  }

  // The first packet of a batch always exists.
  template <class B>
  __device__ __forceinline__ void add(const B& batch, const Packet<T, B::V> (&x)[B::U]) {
    A value[B::V];
    if (group == 0) {
      x[0].unpack(value);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        rebase(k, value[k]);
        first[k] = value[k], sum[k] = squares[k] = 0;
      }
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
      const A d = sum[k] * one_over_n, delta = added(d, -spread[k].mean);
      spread[k].count = total;  // the same in all columns
      spread[k].mean = fused(delta, share, spread[k].mean);
      spread[k].m2 = added(spread[k].m2, fused(delta * delta, weight, fused(-sum[k], d, squares[k])));
    }
    group = 0;
  }

  // All threads call when their values are through; `pivots` gets those of the tile's channels.
  __device__ __forceinline__ void end(A (&pivots)[kTile], const Plan& plan, const Work& work) {
    if (int(threadIdx.x) < work.channels(plan)) {
      A value[1];
      pivot.unpack(value);
      pivots[threadIdx.x] = value[0];
    }
    __syncthreads();
    close();
    A mine[K];
    pick<kRows, V>(mine, pivots, plan, work);
#pragma unroll
    for (int k = 0; k < K; ++k) rebase(k, mine[k]);
  }

 private:
  // The mean so far relative to `to`; 0 of no values.
  __device__ __forceinline__ void rebase(int k, A to) {
    spread[k].mean = spread[0].count > 0 ? added(spread[k].mean, added(first[k], -to)) : A(0);
  }

  A first[K], sum[K], squares[K];
  int group = 0;       // values in it
  Packet<T, 1> pivot;  // of channel threadIdx.x of the tile
};

}  // namespace fastvit
