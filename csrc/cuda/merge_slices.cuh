// Merges the threads' results into one total per channel. merge_block does so within a block, and
// merge_slices across the blocks of a tile.
//
// A block has a tile (some channels) and a slice (a share of the values of these channels). Each block of a
// tile writes its results to global memory and then increments a counter. The last block to do so merges the
// results of all of them, which it sees because the counter orders memory accesses. If a tile has many
// slices, they form groups: the last block of each group merges the group's slices, and the last of these
// blocks merges the groups. In a single launch the other blocks then wait until it has published the totals.
//
// The order of merging depends only on the launch, so the same call on the same device gives the same bits.
// R is a plain struct with the result for one channel, such as its moments, and a function merge(const R&).
// merge has no branches, so that several merges overlap. Merging an R{} has no effect.
#pragma once

#include "../elementary_functions.h"
#include "../moments.h"
#include "ptx.cuh"
#include "walk.cuh"

namespace fastvit {

constexpr unsigned kLoadsInFlight = 8;  // results of slices that a thread loads together
// A semaphore, a counter in global memory, tells blocks what others have done. A stream has this many.
constexpr int64_t kMaxSemaphores = 2 * kMaxMergedTiles;
// An exchange between ranks (exchange.cuh) has further counters: how many tiles are finished; how many ranges
// of channels have been received from all ranks, or have failed; whether one has failed.
constexpr int64_t kExchangeCounters = 3;

// How the slices of a tile are merged: in `count` groups of `size` slices (the last group may have fewer).
// There are no groups if one block can merge all slices in two rounds of loads, or if there are too few
// semaphores. Then size is 1, and count is the number of slices.
struct MergeGroups {
  unsigned size, count;

  explicit MergeGroups(const LaunchPlan& plan) : size(1), count(plan.slices) {
    // Two rounds of kLoadsInFlight slices per merge team (merge_slice_results), a thread for each channel.
    const unsigned merge_teams = unsigned(kThreads / plan.tile_channels),
                   max_size = 2 * kLoadsInFlight * merge_teams;
    if (plan.slices <= max_size) return;
    const unsigned groups = (plan.slices + max_size - 1) / max_size;
    if (semaphores(plan, groups) <= kMaxSemaphores) size = max_size, count = groups;
  }
  // Returns the number of semaphores. A tile has one that counts its finished slices (or groups), one by
  // which its blocks learn that the totals are published, and one for each group, which counts the group's
  // finished slices.
  static int64_t semaphores(const LaunchPlan& plan, unsigned groups) {
    return int64_t(plan.tiles) * (2 + int64_t(groups));
  }
  int64_t semaphores(const LaunchPlan& plan) const { return semaphores(plan, size > 1 ? count : 0); }
};

// The two sums of a channel in batch norm's backward pass. dv is the gradient of the activation's input. The
// second sum is of dv times a second factor of each element: x - mean, or xhat.
template <class A>
struct GradientSums {
  A dv = 0, dv_times_second_factor = 0;
  __device__ __forceinline__ void merge(const GradientSums& other) {
    dv += other.dv;
    dv_times_second_factor += other.dv_times_second_factor;
  }
};

// A thread's sums, so far. Each addition also subtracts the rounding error of the addition before it
// (Kahan, 1965), so the error does not grow with the number of values.
template <class A>
struct KahanSums {
  GradientSums<A> sums, compensation;
  __device__ __forceinline__ void add(const GradientSums<A>& terms) {
    add(sums.dv, compensation.dv, terms.dv);
    add(sums.dv_times_second_factor, compensation.dv_times_second_factor, terms.dv_times_second_factor);
  }
  __device__ __forceinline__ operator const GradientSums<A>&() const { return sums; }

 private:
  __device__ __forceinline__ static void add(A& sum, A& compensation, A term) {
    const A corrected = term - compensation, total = sum + corrected;
    compensation = (total - sum) - corrected;
    sum = total;
  }
};

// Returns a / b, where b must not be denormal. For float the error is at most 2 ulp.
__device__ __forceinline__ float approximate_quotient(float a, float b) {
  return a * reciprocal(b, b);  // the second b only selects the type
}
__device__ __forceinline__ double approximate_quotient(double a, double b) {
  return a / b;
}

// Moments of a part of a channel's values: their count, their mean and m2, the sum of squared deviations from
// that mean. merge() is the update of Chan, Golub, LeVeque (moments.h). It uses the counts only as weights,
// so counts that are rounded to A are exact enough.
template <class A>
struct PartialMoments {
  A count = 0, mean = 0, m2 = 0;
  __device__ __forceinline__ void merge(const PartialMoments& other) {
    const A total = count + other.count, delta = other.mean - mean;
    const A other_share = approximate_quotient(other.count, max(total, A(1)));  // 0 for two empty sets
    m2 = add_rn(m2, fma_rn(delta * delta, count * other_share, other.m2));
    mean = fma_rn(delta, other_share, mean);
    count = total;
  }
};

// Merges each of several sequences of results in shared memory into its first element. All threads call.
// Element i of sequence n is shared[n * sequence_stride + i * element_stride].
template <class R>
__device__ __forceinline__ void merge_tree(R* shared, int sequences, int sequence_stride, int elements,
                                           int element_stride) {
  for (int unmerged = elements; unmerged > 1; unmerged = (unmerged + 1) / 2) {
    const int half = (unmerged + 1) / 2;
    __syncthreads();
    for (int t = threadIdx.x; t < (unmerged - half) * sequences; t += kThreads) {
      const int i = t / sequences, n = t - i * sequences;
      R* element = shared + n * sequence_stride + i * element_stride;
      element->merge(element[half * element_stride]);
    }
  }
  __syncthreads();
}

// Merges the results of a block's threads, for each channel of its tile. A thread has K results: one for each
// of its columns (rows), or one (planes). Returns the stride of the merged results: the result of a channel
// of the tile is shared[tile_channel * stride]. ThreadResult: R, or a type that converts to R.
template <int K, class R, class ThreadResult>
__device__ __forceinline__ int merge_block(R* shared, const ThreadResult (&thread_results)[K],
                                           const LaunchPlan& plan, const BlockWork& work) {
  // columns: the results of a team. With planes, each thread counts as a team with one result.
  const int columns = plan.is_rows ? plan.team_size * K : 1;
  const int teams = plan.is_rows ? plan.teams : plan.teams * plan.team_size;
  if (work.team < plan.teams) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      shared[(work.team * plan.team_size + work.member) * K + k] = thread_results[k];
  }
  merge_tree(shared, columns, /*sequence_stride=*/1, teams, columns);  // per column, over the teams
  if (plan.columns_per_channel > 1)                                    // per channel, over its columns
    merge_tree(shared, plan.tile_channels, plan.columns_per_channel, plan.columns_per_channel, 1);
  return plan.columns_per_channel;
}

// Reads a result that another block wrote during this launch. Bypasses the L1 cache, whose data may be older.
template <class R>
__device__ __forceinline__ R load_uncached(const R* source) {
  static_assert(sizeof(R) % 4 == 0);
  R value;
#pragma unroll
  for (unsigned i = 0; i < sizeof(R) / 4; ++i)
    reinterpret_cast<unsigned*>(&value)[i] = __ldcg(reinterpret_cast<const unsigned*>(source) + i);
  return value;
}

// Global memory through which the blocks of a tile merge their results. Unused if a tile has one slice.
template <class R>
struct SliceResults {
  R* results;            // [slices][channels]
  unsigned* semaphores;  // zero before and after the launch
  MergeGroups groups;
};

// Called by `blocks` blocks. Returns how many of them have arrived at the counter before this one (0 for the
// first). This block then sees everything that they wrote before they arrived. All threads call. The counter
// is zero before the first block arrives, and again after the last.
__device__ __forceinline__ unsigned arrival_number(unsigned* counter, unsigned blocks) {
  __shared__ unsigned number;
  __syncthreads();  // orders the writes of the block's other threads before thread 0's increment
  if (threadIdx.x == 0) number = increment_wrapping(counter, blocks - 1);
  __syncthreads();
  return number;
}
// Counts this block's arrival and returns whether it is the last of `blocks`.
__device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned blocks) {
  return arrival_number(counter, blocks) == blocks - 1;
}

// Merges the results of several slices. Each slice has one result per channel of the tile, and begins
// `stride` results after the slice before it. For each channel of the tile, one thread calls write(). Only
// the block that arrived last may call this function, since the others' results must be there.
template <class R, class Write>
__device__ __forceinline__ void merge_slice_results(R* shared, const R* results, unsigned slices,
                                                    int64_t stride, int channels, const Write& write) {
  static_assert(kMaxTileChannels <= kThreads);
  // A merge team has a thread per channel. It merges every merge_teams-th slice.
  const unsigned merge_teams = min(unsigned(kThreads / channels), slices),
                 merge_team = threadIdx.x / unsigned(channels);
  const int tile_channel = int(threadIdx.x - merge_team * unsigned(channels));
  R total{};
  for (unsigned begin = merge_team < merge_teams ? merge_team : slices; begin < slices;
       begin += kLoadsInFlight * merge_teams) {
    R loaded[kLoadsInFlight];
#pragma unroll
    for (unsigned i = 0; i < kLoadsInFlight; ++i) {
      const unsigned slice = begin + i * merge_teams;
      loaded[i] = R{};
      if (slice < slices) loaded[i] = load_uncached(results + slice * stride + tile_channel);
    }
#pragma unroll
    for (unsigned half = kLoadsInFlight / 2; half > 0; half /= 2) {
#pragma unroll
      for (unsigned i = 0; i < half; ++i) loaded[i].merge(loaded[i + half]);
    }
    total.merge(loaded[0]);
  }
  shared[threadIdx.x] = total;
  merge_tree(shared, channels, /*sequence_stride=*/1, int(merge_teams), channels);
  if (merge_team == 0) write(tile_channel, shared[threadIdx.x]);
}

// The last block of a tile publishes the totals by setting this flag in a semaphore, for which the tile's
// other blocks wait. The semaphore's other bits count the blocks that need it no more; the last of these sets
// it to 0. All threads of a block call publish_totals or wait_for_totals.
constexpr unsigned kPublishedFlag = 1u << 31;

__device__ __forceinline__ void publish_totals(unsigned* semaphore) {
  __syncthreads();
  if (threadIdx.x == 0)
    DeviceAtomic<unsigned>(*semaphore).fetch_add(kPublishedFlag | 1u, cuda::std::memory_order_release);
}
__device__ __forceinline__ void wait_for_totals(unsigned* semaphore, unsigned blocks) {
  if (threadIdx.x == 0) {
    const DeviceAtomic<unsigned> published(*semaphore);
    while (published.load(cuda::std::memory_order_acquire) < kPublishedFlag) {
    }
  }
  __syncthreads();
  // The increment is after the barrier, so no thread waits for it. It wraps to 0 in the last block.
  if (threadIdx.x == 0) atomicInc(semaphore, kPublishedFlag | (blocks - 1));
}

// Merges the results of a tile's slices. On entry `shared` has the results of this block as merge_block left
// them, `stride` elements apart. It has room for kThreads * K results (K as in merge_block). In the tile's
// last block one thread for each channel c calls write(c, total). That block returns true, the others false.
// With kAllBlocksGetTotals the tile's other blocks wait for the last one, and then also call write and return
// true, so all blocks of the grid must be resident. Kept in one function: with functions for its phases,
// kernels need more registers and instructions.
template <bool kAllBlocksGetTotals = false, class R, class Write>
__device__ __forceinline__ bool merge_slices(R* shared, int stride, const SliceResults<R>& slice_results,
                                             const LaunchPlan& plan, const BlockWork& work,
                                             const Write& write) {
  const int channels = work.channels(plan), own_channel = int(threadIdx.x);  // this thread's, of the tile
  const int64_t first_channel = work.first_channel(plan), C = plan.layout.channels;
  if (plan.slices == 1) {
    if (own_channel < channels) write(first_channel + own_channel, shared[own_channel * stride]);
    return true;
  }
  R* const results = slice_results.results + first_channel;
  if (own_channel < channels) results[work.slice * C + own_channel] = shared[own_channel * stride];
  unsigned* const tile_semaphore = slice_results.semaphores + work.tile;
  unsigned* const published_semaphore = tile_semaphore + plan.tiles;
  const MergeGroups& groups = slice_results.groups;
  bool is_last = true;
  if (groups.size > 1) {  // the last block of the group merges the group's slices
    const unsigned group = work.slice / groups.size, first_slice = group * groups.size;
    const unsigned slices = min(groups.size, plan.slices - first_slice);
    R* const group_results = results + first_slice * C;
    unsigned* const group_semaphores = slice_results.semaphores + 2 * plan.tiles + work.tile * groups.count;
    is_last = arrives_last(group_semaphores + group, slices);
    if (is_last)  // the result of the group replaces that of its first slice
      merge_slice_results(shared, group_results, slices, C, channels,
                          [&](int tile_channel, const R& total) { group_results[tile_channel] = total; });
  }
  // The last block of the tile merges the groups, or the slices if there are no groups.
  is_last = is_last && arrives_last(tile_semaphore, groups.count);
  if (is_last)
    merge_slice_results(shared, results, groups.count, groups.size * C, channels,
                        [&](int tile_channel, const R& total) {
                          if (kAllBlocksGetTotals) results[tile_channel] = total;  // for the other blocks
                          write(first_channel + tile_channel, total);
                        });
  if constexpr (kAllBlocksGetTotals) {
    if (is_last) {
      publish_totals(published_semaphore);
    } else {
      wait_for_totals(published_semaphore, plan.slices);
      if (own_channel < channels) write(first_channel + own_channel, load_uncached(results + own_channel));
    }
  }
  return kAllBlocksGetTotals || is_last;
}

}  // namespace fastvit
