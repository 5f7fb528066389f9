// ChunkedMoments: the mean and m2 (sum of squared deviations) of the values of one thread, in one pass.
//
// The values are taken in chunks of one or more batches, usually of 32 values. A chunk's pivot is its first
// value. With d = value - pivot, a chunk sums d and d * d, and m2 = sum(d * d) - sum(d)^2 / n. As one of the
// n deviations d is 0, sum(d)^2 / n <= (n - 1) / n * sum(d * d): at least 1 / n of sum(d * d) remains, so
// one or two digits are lost, however large the mean is. This takes four instructions per value; two passes
// over registers would take five. Squares overflow in float only if values differ by more than 1e18. Chunks
// are merged by Chan's update (moments.h), with quotients whose error is at most 2 ulp.
//
// All means are relative to a pivot, so they are as small as the deviations, and a shift or a merge does not
// cancel digits. The thread's mean is relative to the pivot of its current chunk, and is shifted when a
// chunk begins. Results of several threads can be merged only if their means have the same pivot: finish()
// shifts them to the channel's pivot, which is the channel's first value in memory. The constructor loads
// that value and finish() uses it, so the latency of the load is hidden.
#pragma once

#include "merge_slices.cuh"

namespace fastvit {

constexpr int kChunkValues = 32;

// T: storage type of x. V: elements of a vector. kIsRows: a thread has V columns (elements of a row), and
// moments of each, even if some are of one channel. Otherwise (planes) it has the moments of one channel.
template <class T, bool kIsRows, int V>
struct ChunkedMoments {
  using A = Accumulation<T>;
  static constexpr int kThreadChannels = kIsRows ? V : 1;
  static constexpr int kTileCapacity = kIsRows ? kMaxTileChannels : 1;  // the most channels of a tile
  // Moments of the complete chunks, with means relative to chunk_pivot. After finish(): of all values, with
  // means relative to the channels' pivots.
  PartialMoments<A> moments[kThreadChannels];

  __device__ __forceinline__ ChunkedMoments(const LaunchPlan& plan, const BlockWork& work, const void* x) {
    static_assert(kTileCapacity <= kThreads);
    if (int(threadIdx.x) < work.channels(plan) && plan.layout.outer > 0)
      channel_pivot.load(static_cast<const T*>(x) +
                         (work.first_channel(plan) + threadIdx.x) * plan.layout.strides[0].channel);
    else
      channel_pivot.clear();
  }

  // Adds the values of a batch, the vectors that a thread loads together. B: a Batch of walk.cuh.
  template <class B>
  __device__ __forceinline__ void add(const B& batch, const Vector<T, B::V> (&x)[B::U]) {
    A value[B::V];
    if (kChunkIsBatch || chunk_count == 0) {  // begins a chunk; x[0] is always valid
      x[0].unpack(value);
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
        move_pivot(k, value[k]);
        chunk_pivot[k] = value[k], sum[k] = sum_of_squares[k] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < B::U; ++j)
      if (batch.valid[j]) {
        x[j].unpack(value);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {
          const int i = kIsRows ? k : 0;
          const A d = value[k] - chunk_pivot[i];
          sum[i] += d;
          sum_of_squares[i] = fma_rn(d, d, sum_of_squares[i]);
        }
        chunk_count += kIsRows ? 1 : B::V;
      }
    if (kChunkIsBatch || chunk_count >= kChunkValues) close_chunk();
  }

  // Completes `moments`, and writes the pivots of the tile's channels to shared memory. All threads call
  // after their last value.
  __device__ __forceinline__ void finish(A (&pivots)[kTileCapacity], const LaunchPlan& plan,
                                         const BlockWork& work) {
    if (int(threadIdx.x) < work.channels(plan)) {
      A value[1];
      channel_pivot.unpack(value);
      pivots[threadIdx.x] = value[0];
    }
    __syncthreads();
    if (chunk_count > 0) close_chunk();
    A thread_pivots[kThreadChannels];
    load_thread_constants<kIsRows, V>(thread_pivots, pivots, plan, work);
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) move_pivot(k, thread_pivots[k]);
  }

 private:
  // Whether each batch is a chunk: in planes of 16-bit elements, a batch has 32 values of the channel.
  static constexpr bool kChunkIsBatch = !kIsRows && V * kMaxBatchVectors >= kChunkValues;

  // Merges the current chunk into `moments`.
  __device__ __forceinline__ void close_chunk() {
    const A n = A(chunk_count), one_over_n = approximate_quotient(A(1), n);
    const A count = moments[0].count, total = count + n, chunk_share = approximate_quotient(n, total),
            weight = count * chunk_share;
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      const A chunk_mean = sum[k] * one_over_n, delta = add_rn(chunk_mean, -moments[k].mean);
      moments[k].count = total;  // the same in all columns
      moments[k].mean = fma_rn(delta, chunk_share, moments[k].mean);
      moments[k].m2 = add_rn(moments[k].m2,
                             fma_rn(delta * delta, weight, fma_rn(-sum[k], chunk_mean, sum_of_squares[k])));
    }
    chunk_count = 0;
  }

  // Makes mean k, which is relative to chunk_pivot[k], relative to new_pivot. The mean of no values stays 0.
  __device__ __forceinline__ void move_pivot(int k, A new_pivot) {
    // 1 if there are values, else 0. It is a factor, because the compiler would turn a condition into a
    // branch.
    const A has_values = min(moments[0].count, A(1));
    moments[k].mean = has_values * add_rn(moments[k].mean, add_rn(chunk_pivot[k], -new_pivot));
  }

  A chunk_pivot[kThreadChannels] = {};  // the pivot of the current chunk, per channel
  A sum[kThreadChannels],
      sum_of_squares[kThreadChannels];  // of the current chunk's deviations from chunk_pivot
  int chunk_count = 0;                  // values per channel in the current chunk
  Vector<T, 1> channel_pivot;           // the pivot of channel threadIdx.x of the tile
};

}  // namespace fastvit
