// Merges the threads' results: first within a block; then the slices of a tile, group by group, in the last
// block of each group to finish; then the groups, in the last block of the tile.
//
// The order depends only on the launch, so the same call on the same device gives the same bits. A result R
// is a plain struct with merge(const R&), without branches; merging R{} has no effect.
#pragma once

#include "../elementary_functions.h"
#include "../moments.h"
#include "ptx.cuh"
#include "walk.cuh"

namespace fastvit {

constexpr unsigned kLoadsInFlight = 8;  // results of slices that a thread loads together
constexpr int64_t kMaxSemaphores = 2 * kMaxMergedTiles;
constexpr int64_t kExchangeCounters = 3;  // finished tiles, ended parts, failed parts: exchange.cuh

// How the slices of a tile merge: in `count` groups of `size`, which is 1 where one block merges all slices
// as fast as it would merge one group.
struct MergeGroups {
  unsigned size, count;

  explicit MergeGroups(const LaunchPlan& plan) : size(1), count(plan.slices) {
    const unsigned teams = unsigned(kThreads / plan.tile_channels), most = 2 * kLoadsInFlight * teams;
    if (plan.slices <= most) return;
    const unsigned groups = (plan.slices + most - 1) / most;
    if (semaphores(plan, groups) <= kMaxSemaphores) size = most, count = groups;
  }
  // Semaphores: one per tile, one for the totals that its blocks wait for, and one per group.
  static int64_t semaphores(const LaunchPlan& plan, unsigned groups) {
    return int64_t(plan.tiles) * (2 + int64_t(groups));
  }
  int64_t semaphores(const LaunchPlan& plan) const { return semaphores(plan, size > 1 ? count : 0); }
};

template <class A>
struct GradientSums {
  A dv = 0, dv_second = 0;
  __device__ __forceinline__ void merge(const GradientSums& other) {
    dv += other.dv;
    dv_second += other.dv_second;
  }
};

// A thread's running sums. The rounding error of each addition is carried into the next (Kahan, 1965), so the
// error does not grow with the number of values.
template <class A>
struct KahanSums {
  GradientSums<A> sums, compensation;
  __device__ __forceinline__ void add(const GradientSums<A>& more) {
    add(sums.dv, compensation.dv, more.dv);
    add(sums.dv_second, compensation.dv_second, more.dv_second);
  }
  __device__ __forceinline__ operator const GradientSums<A>&() const { return sums; }

 private:
  __device__ __forceinline__ static void add(A& sum, A& compensation, A more) {
    const A corrected = more - compensation, total = sum + corrected;
    compensation = (total - sum) - corrected;
    sum = total;
  }
};

// a / b, in float to 2 ulp, for b that is not denormal.
__device__ __forceinline__ float approximate_quotient(float a, float b) {
  return a * reciprocal(b, b);
}
__device__ __forceinline__ double approximate_quotient(double a, double b) {
  return a / b;
}

// Moments of one channel (Chan, Golub, LeVeque, see moments.h). The count is only a weight, and needs no more
// digits than the mean.
template <class A>
struct PartialMoments {
  A count = 0, mean = 0, m2 = 0;
  __device__ __forceinline__ void merge(const PartialMoments& other) {
    const A total = count + other.count, delta = other.mean - mean;
    const A fraction = approximate_quotient(other.count, max(total, A(1)));  // 0 for two empty sets
    m2 = add_rn(m2, fma_rn(delta * delta, count * fraction, other.m2));
    mean = fma_rn(delta, fraction, mean);
    count = total;
  }
};

// shared[g * group_stride + i * stride], i < length, merge into i = 0, for every g < groups.
template <class R>
__device__ __forceinline__ void merge_tree(R* shared, int groups, int group_stride, int length, int stride) {
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

// Merges the results of a block's threads, K each (rows: one per column; planes: one), per channel of its
// tile. Returns a stride: shared[g * stride] is the total of the tile's channel g.
template <int K, class R, class Mine>
__device__ __forceinline__ int merge_block(R* shared, const Mine (&mine)[K], const LaunchPlan& plan,
                                           const BlockWork& work) {
  const int width = plan.is_rows ? plan.team_size * K : 1;
  const int teams = plan.is_rows ? plan.teams : plan.teams * plan.team_size;
  if (work.team < plan.teams) {
#pragma unroll
    for (int k = 0; k < K; ++k) shared[(work.team * plan.team_size + work.member) * K + k] = mine[k];
  }
  merge_tree(shared, width, 1, teams, width);
  if (plan.columns_per_channel > 1)
    merge_tree(shared, plan.tile_channels, plan.columns_per_channel, plan.columns_per_channel, 1);
  return plan.columns_per_channel;
}

// Reads global memory that another block wrote during this launch. Bypasses the L1 cache, which is not
// coherent.
template <class R>
__device__ __forceinline__ R load_uncached(const R* p) {
  static_assert(sizeof(R) % 4 == 0);
  R value;
#pragma unroll
  for (unsigned i = 0; i < sizeof(R) / 4; ++i)
    reinterpret_cast<unsigned*>(&value)[i] = __ldcg(reinterpret_cast<const unsigned*>(p) + i);
  return value;
}

// Global memory through which the blocks of a tile merge; unused for a single slice.
template <class R>
struct SliceResults {
  R* results;            // [slices][C]
  unsigned* semaphores;  // zero before the launch and after it
  MergeGroups groups;
};

// The number of `blocks` blocks that called before this one, which sees all that they wrote before their
// call. All threads call. `counter` is zero before the first call and after the last.
__device__ __forceinline__ unsigned arrival_number(unsigned* counter, unsigned blocks) {
  __shared__ unsigned turn;
  __syncthreads();  // collects the block's writes
  if (threadIdx.x == 0) turn = increment_wrapping(counter, blocks - 1);
  __syncthreads();
  return turn;
}
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned blocks) {
  return arrival_number(counter, blocks) == blocks - 1;
}

// Merges `rows` rows of results, `stride` apart, each with one result per channel of the tile. One thread
// calls write(g, total) for channel g of the tile. Runs in the last block, which may read all rows.
template <class R, class Write>
__device__ __forceinline__ void merge_slice_results(R* shared, const R* results, unsigned rows,
                                                    int64_t stride, int channels, const Write& write) {
  static_assert(kMaxTile <= kThreads);
  const unsigned teams = min(unsigned(kThreads / channels), rows), team = threadIdx.x / unsigned(channels);
  const int g = int(threadIdx.x - team * unsigned(channels));
  R total{};
  for (unsigned first = team < teams ? team : rows; first < rows; first += kLoadsInFlight * teams) {
    R ahead[kLoadsInFlight];
#pragma unroll
    for (unsigned i = 0; i < kLoadsInFlight; ++i) {
      const unsigned row = first + i * teams;
      ahead[i] = R{};
      if (row < rows) ahead[i] = load_uncached(results + row * stride + g);
    }
#pragma unroll
    for (unsigned half = kLoadsInFlight / 2; half > 0; half /= 2) {
#pragma unroll
      for (unsigned i = 0; i < half; ++i) ahead[i].merge(ahead[i + half]);
    }
    total.merge(ahead[0]);
  }
  shared[threadIdx.x] = total;
  merge_tree(shared, channels, 1, int(teams), channels);
  if (team == 0) write(g, shared[threadIdx.x]);
}

constexpr unsigned kPublishedFlag = 1u << 31;

// In the last block of a tile: publishes its writes to the others. All threads call.
__device__ __forceinline__ void publish(unsigned* semaphore) {
  __syncthreads();
  if (threadIdx.x == 0)
    DeviceAtomic<unsigned>(*semaphore).fetch_add(kPublishedFlag | 1u, cuda::std::memory_order_release);
}
// In the other blocks: waits for `publish`. The last of the `blocks` blocks to pass clears the semaphore.
__device__ __forceinline__ void await(unsigned* semaphore, unsigned blocks) {
  if (threadIdx.x == 0) {
    const DeviceAtomic<unsigned> published(*semaphore);
    while (published.load(cuda::std::memory_order_acquire) < kPublishedFlag) {
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicInc(semaphore, kPublishedFlag | (blocks - 1));  // no block waits for it
}

// Calls write(c, total) with the totals of the tile's channels over all slices, and returns true, in the last
// block of the tile to finish, or with kAllBlocksGetTotals in every block of the tile. These wait for the last one,
// so all must be resident. `shared` holds kThreads * K results, at first those of merge_block, `stride`
// apart.
template <bool kAllBlocksGetTotals = false, class R, class Write>
__device__ __forceinline__ bool merge_slices(R* shared, int stride, const SliceResults<R>& slice_results,
                                             const LaunchPlan& plan, const BlockWork& work,
                                             const Write& write) {
  const int channels = work.channels(plan), own = int(threadIdx.x);  // one channel per thread at most
  const int64_t first = work.first_channel(plan), C = plan.layout.channels;
  if (plan.slices == 1) {
    if (own < channels) write(first + own, shared[own * stride]);
    return true;
  }
  R* const results = slice_results.results + first;
  if (own < channels) results[work.slice * C + own] = shared[own * stride];
  unsigned *const tile = slice_results.semaphores + work.tile, *const published = tile + plan.tiles;
  const MergeGroups& groups = slice_results.groups;
  bool last = true;
  if (groups.size > 1) {
    const unsigned group = work.slice / groups.size, begin = group * groups.size;
    const unsigned slices = min(groups.size, plan.slices - begin);
    R* const mine = results + begin * C;
    last = arrives_last(slice_results.semaphores + 2 * plan.tiles + work.tile * groups.count + group, slices);
    if (last)  // the group's result replaces that of its first slice
      merge_slice_results(shared, mine, slices, C, channels, [&](int g, const R& total) { mine[g] = total; });
  }
  last = last && arrives_last(tile, groups.count);
  if (last)
    merge_slice_results(shared, results, groups.count, groups.size * C, channels, [&](int g, const R& total) {
      if (kAllBlocksGetTotals) results[g] = total;
      write(first + g, total);
    });
  if constexpr (kAllBlocksGetTotals) {
    if (last) {
      publish(published);
    } else {
      await(published, plan.slices);
      if (own < channels) write(first + own, load_uncached(results + own));
    }
  }
  return kAllBlocksGetTotals || last;
}

}  // namespace fastvit
