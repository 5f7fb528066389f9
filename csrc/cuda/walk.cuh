// The walk of one block over its slice, as the plan divides it: batches of packets for a kernel's body.
#pragma once

#include "plan.h"
#include "vector_io.cuh"

namespace fastvit {

// Where a thread's next kBatch packets lie: element offsets into each operand, and which elements of each
// packet exist. Only the ends of a plane have packets in part (kParts); a packet past the end has none.
template <int V, int kOperands, bool kParts>
struct Batch {
  int64_t offset[kOperands][kBatch];
  int first[kBatch], last[kBatch];

  __device__ __forceinline__ int count() const {
    int n = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) n += last[j] - first[j];
    return n;
  }

  template <class T>
  __device__ __forceinline__ void load(Packet<T, V> (&to)[kBatch], const T* p, int operand) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j].template load<kParts>(p + offset[operand][j], first[j], last[j]);
  }
  template <class T>
  __device__ __forceinline__ void store(const Packet<T, V> (&from)[kBatch], T* p, int operand) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) from[j].template store<kParts>(p + offset[operand][j], first[j], last[j]);
  }
};

// Offsets of outer index n, all operands.
template <int kOperands>
__device__ __forceinline__ void outer_offsets(const Layout& l, int64_t n, int64_t (&offset)[kOperands]) {
  if (l.outer_dims <= 1) {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[k] = n * l.strides[k].outer[0];
    return;
  }
#pragma unroll
  for (int k = 0; k < kOperands; ++k) offset[k] = 0;
  for (int d = l.outer_dims - 1; d >= 0; --d) {
    const int64_t size = l.outer_size[d], next = n / size, i = n - next * size;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[k] += i * l.strides[k].outer[d];
    n = next;
  }
}

struct Work {  // of this block
  int64_t tile, slice, begin, end;
  int lane, team;

  __device__ __forceinline__ Work(const Plan& plan, int64_t block) {
    slice = block / plan.tiles;
    tile = block - slice * plan.tiles;
    begin = slice * plan.units_per_slice;
    end = begin + plan.units_per_slice < plan.units ? begin + plan.units_per_slice : plan.units;
    team = int(threadIdx.x) / plan.lanes;
    lane = int(threadIdx.x) - team * plan.lanes;
  }
};

// Planes: body(batch) for this thread's packets of channel work.tile. `p` is operand 0, for its alignment.
template <int V, int kOperands, class T, class Body>
__device__ __forceinline__ void walk_planes(const Plan& plan, const Work& work, const T* p, const Body& body) {
  const Layout& l = plan.layout;
  for (int64_t unit = work.begin + work.team; unit < work.end; unit += plan.teams) {
    const int64_t n = plan.segments == 1 ? unit : unit / plan.segments;
    const int64_t start = (unit - n * plan.segments) * plan.segment;
    const int length = int(l.S - start < plan.segment ? l.S - start : plan.segment);
    int64_t base[kOperands];
    outer_offsets(l, n, base);
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      base[k] += work.tile * l.strides[k].channel + start * l.strides[k].inner;
    const int skip = V == 1 ? 0 : int(reinterpret_cast<uintptr_t>(p + base[0]) % 16 / sizeof(T));
    for (int i = work.lane * V - skip; i < length; i += plan.lanes * V * kBatch) {
      Batch<V, kOperands, (V > 1)> batch;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at = i + j * plan.lanes * V, end = max(0, min(V, length - at));
        batch.first[j] = min(end, max(0, -at));
        batch.last[j] = end;
#pragma unroll
        for (int k = 0; k < kOperands; ++k)
          batch.offset[k][j] = base[k] + (V == 1 ? at * l.strides[k].inner : at);
      }
      body(batch);
    }
  }
}

// Rows: body(batch) for this thread's columns of the rows of work; lane_column is the first of them.
template <int V, int kOperands, class Body>
__device__ __forceinline__ void walk_rows(const Plan& plan, const Work& work, const Body& body) {
  const Layout& l = plan.layout;
  const int64_t column = work.tile * plan.tile * plan.fold + work.lane * V;
  if (work.team >= plan.teams || column >= plan.columns) return;
  for (int64_t n = work.begin + work.team; n < work.end; n += plan.teams * kBatch) {
    Batch<V, kOperands, false> batch;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t row = n + j * plan.teams;
      batch.first[j] = 0;
      batch.last[j] = row < work.end ? V : 0;
      int64_t base[kOperands];
      outer_offsets(l, row < work.end ? row : n, base);
#pragma unroll
      for (int k = 0; k < kOperands; ++k)
        batch.offset[k][j] = base[k] + column * (plan.fold > 1 ? 1 : l.strides[k].channel);
    }
    body(batch);
  }
}

// Channels of the block's tile, and the tile's channel that column k of this thread belongs to.
__device__ __forceinline__ int tile_channels(const Plan& plan, const Work& work) {
  const int64_t left = plan.layout.C - work.tile * plan.tile;
  return int(left < plan.tile ? left : plan.tile);
}
template <int V>
__device__ __forceinline__ int tile_channel(const Plan& plan, const Work& work, int k) {
  const int column = work.lane * V + k;
  return plan.fold == 1 ? column : column / plan.fold;
}

}  // namespace fastvit
