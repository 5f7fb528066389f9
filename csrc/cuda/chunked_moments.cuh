// The statistics of one thread, for bn_stats and the on-chip forward.
//
// Values are summed in chunks of 32, relative to the first of the chunk: sum of d and of d * d, then
// m2 = sum_of_squares - sum * sum / n. The first value is one of the n, so at most a fraction of (n - 1) / n
// cancels, which costs one or two digits for any first value. This takes four instructions per element; two
// passes over registers take five. Squares of float overflow only if values differ by more than 1e18. Chunks
// are merged by Chan's update, once per 32 values, with a reciprocal that is accurate to 2 ulp.
//
// A thread's mean is relative to the first value of its current chunk, and is shifted when a chunk begins.
// Before threads merge, all means of a channel are shifted to be relative to the pivot,
// the channel's first value in memory. Such means are of the size of the deviations, so shifts and merges
// lose no digits for any mean. Pivots are loaded at the kernel's start and used at its end, which hides the
// latency.
#pragma once

#include "merge_slices.cuh"

namespace fastvit {

constexpr int kChunkValues = 32;

template <class T, bool kIsRows, int V>
struct ChunkedMoments {  // rows: one channel per column; planes: one
  using A = Accumulation<T>;
  static constexpr int K = kIsRows ? V : 1;
  static constexpr int kTile = kIsRows ? kMaxTile : 1;
  PartialMoments<A> moments[K];  // of the complete chunks; of all values after finish()

  __device__ __forceinline__ ChunkedMoments(const LaunchPlan& plan, const BlockWork& work, const void* x) {
    static_assert(kTile <= kThreads);
    if (int(threadIdx.x) < work.channels(plan) && plan.layout.outer > 0)
      pivot.load(static_cast<const T*>(x) +
                 (work.first_channel(plan) + threadIdx.x) * plan.layout.strides[0].channel);
    else
      pivot.clear();
  }

  template <class B>
  __device__ __forceinline__ void add(const B& batch, const Vector<T, B::V> (&x)[B::U]) {
    A value[B::V];
    if (kChunkIsBatch || chunk_count == 0) {
      x[0].unpack(value);
#pragma unroll
      for (int k = 0; k < K; ++k) {
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

  // All threads call it after their last value; writes the pivots of the tile's channels to `pivots`.
  __device__ __forceinline__ void finish(A (&pivots)[kTile], const LaunchPlan& plan, const BlockWork& work) {
    if (int(threadIdx.x) < work.channels(plan)) {
      A value[1];
      pivot.unpack(value);
      pivots[threadIdx.x] = value[0];
    }
    __syncthreads();
    if (chunk_count > 0) close_chunk();
    A mine[K];
    load_thread_constants<kIsRows, V>(mine, pivots, plan, work);
#pragma unroll
    for (int k = 0; k < K; ++k) move_pivot(k, mine[k]);
  }

 private:
  // A batch of 16-bit planes has the values of a chunk, so chunks do not extend over batches.
  static constexpr bool kChunkIsBatch = !kIsRows && V * kBatch >= kChunkValues;

  // Merges the chunk into the values before it.
  __device__ __forceinline__ void close_chunk() {
    const A n = A(chunk_count), one_over_n = approximate_quotient(A(1), n);
    const A count = moments[0].count, total = count + n, fraction = approximate_quotient(n, total),
            weight = count * fraction;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const A d = sum[k] * one_over_n, delta = add_rn(d, -moments[k].mean);
      moments[k].count = total;  // the same in all columns
      moments[k].mean = fma_rn(delta, fraction, moments[k].mean);
      moments[k].m2 =
          add_rn(moments[k].m2, fma_rn(delta * delta, weight, fma_rn(-sum[k], d, sum_of_squares[k])));
    }
    chunk_count = 0;
  }

  // The mean so far, relative to `to`; 0 without values.
  __device__ __forceinline__ void move_pivot(int k, A to) {
    const A any = min(moments[0].count, A(1));  // a factor, as a condition becomes a branch
    moments[k].mean = any * add_rn(moments[k].mean, add_rn(chunk_pivot[k], -to));
  }

  A chunk_pivot[K] = {}, sum[K], sum_of_squares[K];
  int chunk_count = 0;  // values in the current chunk
  Vector<T, 1> pivot;   // the pivot of channel threadIdx.x of the tile
};

}  // namespace fastvit
