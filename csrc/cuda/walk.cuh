// The walk of one block over its slice: calls a kernel's body with batches of vectors, by the plan.
//
// Slices interleave, so that all blocks together read memory once, in order. kReverse walks from the end,
// where the data that the previous op accessed last is still in the L2 cache.
#pragma once

#include "plan.h"
#include "vector_io.cuh"

namespace fastvit {

// A thread's next U vectors of V elements. The first vector exists. One past the end is loaded as zeros and
// is not stored.
enum class WalkOrder { ascending, descending };

template <int V_, int U_, int kOperands>
struct Batch {
  static constexpr int V = V_, U = U_;
  using Single = Batch<V, 1, kOperands>;
  static constexpr int kOffsets = V == 1 ? U : 1;
  int64_t offset[kOperands][kOffsets];  // in elements: of the first vector, or of each that is one element
  int vector_stride[kOperands];         // vectors of an operand from one of the batch to the next
  bool valid[U];

  __device__ __forceinline__ Single vector(int j) const {
    Single one;
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      one.offset[k][0] = V == 1 ? offset[k][j] : offset[k][0] + int64_t(vector_stride[k]) * (j * V);
    one.valid[0] = valid[j];
    return one;
  }

  template <CacheHint kHint = kNoHint, class T>
  __device__ __forceinline__ void load(Vector<T, V> (&to)[U], const void* p, int operand) const {
#pragma unroll
    for (int j = 0; j < U; ++j) {
      if (valid[j])
        to[j].template load<kHint>(at(static_cast<const T*>(p), operand, j));
      else
        to[j].clear();
    }
  }
  template <class T>
  __device__ __forceinline__ void store(const Vector<T, V> (&from)[U], void* p, int operand) const {
#pragma unroll
    for (int j = 0; j < U; ++j)
      if (valid[j]) from[j].store(at(static_cast<T*>(p), operand, j));
  }

 private:
  template <class T>
  __device__ __forceinline__ T* at(T* p, int operand, int j) const {
    return p + (V == 1 ? offset[operand][j] : offset[operand][0] + int64_t(vector_stride[operand]) * (j * V));
  }
};

// Offsets of outer index n, all operands. Only plans without vectors have more than one outer dimension.
template <bool kVectorWidth, int kOperands>
__device__ __forceinline__ void outer_offsets(const WalkLayout& layout, int64_t n,
                                              int64_t (&offset)[kOperands]) {
  const bool simple = kVectorWidth || layout.outer_dims <= 1;
#pragma unroll
  for (int k = 0; k < kOperands; ++k) offset[k] = simple ? n * layout.strides[k].outer[0] : 0;
  if constexpr (!kVectorWidth) {
#pragma unroll 1
    for (int d = simple ? -1 : layout.outer_dims - 1; d >= 0; --d) {
      const int64_t size = layout.outer_size[d], next = n / size, i = n - next * size;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += i * layout.strides[k].outer[d];
      n = next;
    }
  }
}

struct BlockWork {  // the tile, slice and position of this block and thread
  unsigned tile, slice;
  int member, team;

  __device__ __forceinline__ BlockWork(const LaunchPlan& plan, unsigned block) {
    slice = block / plan.tiles;
    tile = block - slice * plan.tiles;
    team = int(threadIdx.x) / plan.team_size;
    member = int(threadIdx.x) - team * plan.team_size;
  }
  __device__ __forceinline__ int64_t first_channel(const LaunchPlan& plan) const {
    return int64_t(tile) * plan.tile_channels;
  }
  __device__ __forceinline__ int channels(const LaunchPlan& plan) const {
    const int64_t left = plan.layout.channels - first_channel(plan);
    return int(left < plan.tile_channels ? left : plan.tile_channels);
  }
};

// The entries of a tile's table for the channels of this thread: its K columns, or the one of a plane.
template <bool kIsRows, int V, class Constants, int K>
__device__ __forceinline__ void load_thread_constants(Constants (&mine)[K], const Constants* table,
                                                      const LaunchPlan& plan, const BlockWork& work) {
  if constexpr (kIsRows) {
    const int last = max(0, work.channels(plan) - 1);  // keeps threads past the last column within the table
    int g = work.member * V, left = 1;                 // columns until the next channel
    if (plan.columns_per_channel > 1) {
      const int column = g;
      g = column / plan.columns_per_channel;
      left = plan.columns_per_channel - (column - g * plan.columns_per_channel);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      mine[k] = table[min(g, last)];
      if (--left == 0) ++g, left = plan.columns_per_channel;
    }
  } else {
    mine[0] = table[0];
  }
}

// Planes: body(batch) for this thread's elements of channel work.tile: vectors where a whole one lies between
// 16-byte boundaries, single elements before and after. `p` is operand 0, for its alignment.
template <int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void walk_planes(const LaunchPlan& plan, const BlockWork& work, const void* p,
                                            const Body& body) {
  if (work.team >= plan.teams) return;
  const WalkLayout& layout = plan.layout;
  const int64_t step = int64_t(plan.slices) * plan.teams;
  for (int64_t i = int64_t(work.slice) * plan.teams + work.team; i < plan.units; i += step) {
    const int64_t unit = kOrder == WalkOrder::descending ? plan.units - 1 - i : i;
    const int64_t n = plan.segments == 1 ? unit : unit / plan.segments;
    const int64_t start = (unit - n * plan.segments) * plan.segment_length;
    const int length =
        int(layout.inner - start < plan.segment_length ? layout.inner - start : plan.segment_length);
    int64_t base[kOperands];
    outer_offsets<(V > 1)>(layout, n, base);
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      base[k] += work.tile * layout.strides[k].channel + start * layout.strides[k].inner;

    int head = 0, vectors = length;
    if constexpr (V > 1) {
      constexpr int kSize = 16 / V;  // of an element
      head = min(length, int(-(reinterpret_cast<intptr_t>(p) + base[0] * kSize) & 15) / kSize);
      vectors = (length - head) / V;
      const int ends = length - vectors * V;
      for (int e = work.member; e < ends; e += plan.team_size) {
        Batch<1, 1, kOperands> single;
        single.valid[0] = true;
#pragma unroll
        for (int k = 0; k < kOperands; ++k) single.offset[k][0] = base[k] + (e < head ? e : e + vectors * V);
        body(single);
      }
    }
    for (int vector = work.member; vector < vectors; vector += plan.team_size * U) {
      Batch<V, U, kOperands> batch;
#pragma unroll
      for (int j = 0; j < U; ++j) batch.valid[j] = j == 0 || vector + j * plan.team_size < vectors;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        batch.vector_stride[k] = plan.team_size;
#pragma unroll
        for (int j = 0; j < batch.kOffsets; ++j)
          batch.offset[k][j] =
              base[k] + (V > 1 ? head + vector * V : (vector + j * plan.team_size) * layout.strides[k].inner);
      }
      body(batch);
    }
  }
}

// Rows: body(batch) for this thread's columns, of which the first is column lane * V of the tile.
template <int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void walk_rows(const LaunchPlan& plan, const BlockWork& work, const Body& body) {
  using Index = std::conditional_t<(V > 1), unsigned, int64_t>;  // 32 bits suffice: see LaunchPlanner::rows
  const WalkLayout& layout = plan.layout;
  auto column = Index(work.first_channel(plan) * plan.columns_per_channel + work.member * V);
  if (work.team >= plan.teams || column >= plan.columns) return;
  int64_t at_column[kOperands];
  int vector_stride[kOperands];
#pragma unroll
  for (int k = 0; k < kOperands; ++k) {
    at_column[k] = int64_t(column) * (V > 1 || plan.columns_per_channel > 1 ? 1 : layout.strides[k].channel);
    vector_stride[k] =
        (kOrder == WalkOrder::descending ? -plan.teams : plan.teams) * int(layout.strides[k].outer[0] / V);
  }
  const unsigned rows = plan.teams * U;  // of a batch of the block
  const Index units = Index(plan.units), step = plan.slices * rows;
  for (Index i = Index(work.slice) * rows + work.team; i < units; i += step) {
    Batch<V, U, kOperands> batch;
    const int left = int(min(units - i, Index(rows)));
#pragma unroll
    for (int j = 0; j < U; ++j) batch.valid[j] = j == 0 || j * plan.teams < left;
#pragma unroll
    for (int j = 0; j < batch.kOffsets; ++j) {
      const Index from_begin = i + j * plan.teams,
                  row = kOrder == WalkOrder::descending ? units - 1 - from_begin : from_begin;
      int64_t at_row[kOperands];
      if constexpr (V > 1) {
#pragma unroll
        for (int k = 0; k < kOperands; ++k) at_row[k] = uint64_t(row) * unsigned(layout.strides[k].outer[0]);
      } else {
        outer_offsets<false>(layout, row, at_row);
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) batch.offset[k][j] = at_row[k] + at_column[k];
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) batch.vector_stride[k] = vector_stride[k];
    body(batch);
  }
}

// body(batch) for all elements of this thread, see above.
template <bool kIsRows, int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void for_each_batch(const LaunchPlan& plan, const BlockWork& work, const void* p,
                                               const Body& body) {
  if constexpr (kIsRows)
    walk_rows<V, U, kOperands, kOrder>(plan, work, body);
  else
    walk_planes<V, U, kOperands, kOrder>(plan, work, p, body);
}

}  // namespace fastvit
