// Merging the threads' results: first within a block, then the blocks' slices, by the last block to finish.
//
// Everything merges in an order that the launch alone fixes, so the same call on the same device gives the
// same bits. A result R is a plain struct with merge(const R&).
#pragma once

#include <cuda/atomic>

#include "../moments.h"
#include "walk.cuh"

namespace fastvit {

template <class A>
struct Sums {
  A first = 0, second = 0;
  __device__ __forceinline__ void merge(const Sums& other) {
    first += other.first;
    second += other.second;
  }
};

// A thread's running sums: each addition's rounding error is carried into the next (Kahan, 1965), so that the
// number of values does not show.
template <class A>
struct RunningSums {
  Sums<A> sums, lost;
  __device__ __forceinline__ void add(const Sums<A>& more) {
    add(sums.first, lost.first, more.first);
    add(sums.second, lost.second, more.second);
  }
  __device__ __forceinline__ operator const Sums<A>&() const { return sums; }

 private:
  __device__ __forceinline__ static void add(A& sum, A& lost, A more) {
    const A corrected = more - lost, total = sum + corrected;
    lost = (total - sum) - corrected;
    sum = total;
  }
};

template <class A>
struct WelfordState : Moments<A, A> {  // the count of one slice needs no more digits than its mean has
  using Moments<A, A>::merge;
  __device__ __forceinline__ void merge(const WelfordState& other) {
    this->merge(other.count, other.mean, other.m2);
  }
};

// shared[g * group_stride + i * stride], i < length, merge into i = 0, for every g < groups.
template <class R>
__device__ __forceinline__ void merge_groups(R* shared, int groups, int group_stride, int length,
                                             int stride) {
  for (int left = length; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
    __syncthreads();
    for (int t = threadIdx.x; t < (left - half) * groups; t += kThreads) {
      const int i = t / groups, g = t - i * groups;
      R* at = shared + g * group_stride + i * stride;
      at->merge(at[half * stride]);
    }
  }
  __syncthreads();
}

// The results of a block's threads, K each (rows: one per column; planes: one), merged per channel of its
// tile. The total of the tile's channel g is then shared[g * the value returned].
template <int K, class R, class Mine>
__device__ __forceinline__ int merge_block(R* shared, const Mine (&mine)[K], const Plan& plan,
                                           const Work& work) {
  const int width = plan.rows ? plan.lanes * K : 1;
  const int teams = plan.rows ? plan.teams : plan.teams * plan.lanes;
  if (work.team < plan.teams) {
#pragma unroll
    for (int k = 0; k < K; ++k) shared[(work.team * plan.lanes + work.lane) * K + k] = mine[k];
  }
  merge_groups(shared, width, 1, teams, width);
  if (plan.fold > 1) merge_groups(shared, plan.tile, plan.fold, plan.fold, 1);
  return plan.fold;
}

// Global memory that another block wrote during this launch: read past the L1 cache, which is not coherent.
template <class R>
__device__ __forceinline__ R load_written(const R* p) {
  static_assert(sizeof(R) % 4 == 0);
  R value;
#pragma unroll
  for (unsigned i = 0; i < sizeof(R) / 4; ++i)
    reinterpret_cast<unsigned*>(&value)[i] = __ldcg(reinterpret_cast<const unsigned*>(p) + i);
  return value;
}

// Totals over all slices, from `partial`, [slices][C], which every slice's block has written: write(c,
// total).
template <class R, class Write>
__device__ __forceinline__ void merge_slices(R* shared, const R* partial, const Plan& plan, const Work& work,
                                             const Write& write) {
  static_assert(kMostTile <= kThreads);
  const int channels = work.channels(plan), teams = kThreads / channels, team = int(threadIdx.x) / channels;
  const int64_t c = work.first_channel(plan) + int(threadIdx.x) - team * channels;
  R total{};
  if (team < teams) {
#pragma unroll 4
    for (unsigned s = team; s < plan.slices; s += teams)
      total.merge(load_written(partial + int64_t(s) * plan.layout.C + c));
  }
  shared[threadIdx.x] = total;
  merge_groups(shared, channels, 1, teams, channels);
  if (team == 0) write(c, shared[threadIdx.x]);
}

// Hands write(c, total) the totals of the tile's channels, over all slices, and returns true: in the last
// block of the tile to finish, or with kEverywhere in all of them, which wait for each other and so must run
// at once. partial is [slices][C], semaphores [tiles], zero before the launch and after it; both unused for a
// single slice. `shared` has kThreads * K >= kThreads places and holds what merge_block left, `step` apart.
template <bool kEverywhere = false, class R, class Write>
__device__ __forceinline__ bool finish(R* shared, int step, R* partial, unsigned* semaphores,
                                       const Plan& plan, const Work& work, const Write& write) {
  const int channels = work.channels(plan);
  const int64_t first = work.first_channel(plan), C = plan.layout.C;
  if (plan.slices == 1) {
    for (int g = threadIdx.x; g < channels; g += kThreads) write(first + g, shared[g * step]);
    return true;
  }
  for (int g = threadIdx.x; g < channels; g += kThreads)
    partial[work.slice * C + first + g] = shared[g * step];
  unsigned* const semaphore = semaphores + work.tile;
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // the barrier gathered the block's partials; the fence sends them out before the
                      // semaphore
    last = atomicAdd(semaphore, 1u) == plan.slices - 1;
    if constexpr (kEverywhere) {
      const cuda::atomic_ref<unsigned, cuda::thread_scope_device> arrived(*semaphore);
      while (arrived.load(cuda::std::memory_order_acquire) < plan.slices) {
      }
    }
    __threadfence();  // and the other blocks' are seen after it
    // Each block adds once more when it no longer waits; the block that adds last clears the semaphore.
    if (kEverywhere ? atomicAdd(semaphore, 1u) == 2 * plan.slices - 1 : last) atomicExch(semaphore, 0u);
  }
  __syncthreads();
  if (kEverywhere || last) merge_slices(shared, partial, plan, work, write);
  return kEverywhere || last;
}

}  // namespace fastvit
