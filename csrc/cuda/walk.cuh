// for_each_batch walks one thread's share of the elements by a LaunchPlan, and calls a kernel's body with
// batches.
//
// A block has a tile (some channels) and a slice (a share of the values of these channels). A slice has
// units: planes (the inner dimension for one outer index and one channel), segments of planes, or rows. A row
// is all channels for one outer index. If planes are short it is all channels' planes of one image, and a
// channel has columns_per_channel columns. The members of a team of threads access consecutive memory of a
// unit. A batch is the vectors that a thread loads together. The units of the slices are interleaved: at any
// time all blocks access neighboring memory.
//
// The kernels and this file share these template parameters:
//   T  the storage type of elements in memory
//   A  the accumulation type, of arithmetic: float, or double if T is double
//   V  elements of a vector: 16 bytes, or one element
//   U  vectors of a batch
//   K  channels for which a thread has constants and sums: V for rows (one per column), 1 for planes
//   B  the type of a batch: B::U vectors of each operand, of B::V elements: V, or 1 at the ends of a unit
//   kIsRows  true: a block walks its tile's columns (a column is one element of each row) in the rows of its
//            slice, and a thread takes V of them; false: a block walks the planes or segments of its slice,
//            all of one channel
#pragma once

#include "plan.h"
#include "vector_io.cuh"

namespace fastvit {

// A descending walk begins at the end: if the previous kernel accessed that last, it is still in the L2
// cache.
enum class WalkOrder { ascending, descending };

// The next U vectors of a thread, of V elements each, in each of kOperands tensors: the same elements of all.
// The first vector is always valid. A vector beyond the thread's last one is not valid: it is loaded as zeros
// and not stored.
template <int V_, int U_, int kOperands>
struct Batch {
  static constexpr int V = V_, U = U_;
  using Single = Batch<V, 1, kOperands>;  // a batch of one vector
  // Single elements (V == 1) can be anywhere, so each has an offset. Vectors of 16 bytes have equal
  // distances, so the offset of the first and their stride suffice.
  static constexpr int kOffsets = V == 1 ? U : 1;
  int64_t offset[kOperands][kOffsets];  // in elements
  int vector_stride[kOperands];         // in vectors
  bool valid[U];

  // The j-th vector as a batch.
  __device__ __forceinline__ Single vector(int j) const {
    Single single;
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      single.offset[k][0] = V == 1 ? offset[k][j] : offset[k][0] + int64_t(vector_stride[k]) * (j * V);
    single.valid[0] = valid[j];
    return single;
  }

  // Loads from or stores to the tensor at `data`, which is the operand with this index.
  template <CacheHint kHint = kNoCacheHint, class T>
  __device__ __forceinline__ void load(Vector<T, V> (&vectors)[U], const void* data, int operand) const {
#pragma unroll
    for (int j = 0; j < U; ++j) {
      if (valid[j])
        vectors[j].template load<kHint>(address(static_cast<const T*>(data), operand, j));
      else
        vectors[j].clear();
    }
  }
  template <class T>
  __device__ __forceinline__ void store(const Vector<T, V> (&vectors)[U], void* data, int operand) const {
#pragma unroll
    for (int j = 0; j < U; ++j)
      if (valid[j]) vectors[j].store(address(static_cast<T*>(data), operand, j));
  }

 private:
  template <class T>
  __device__ __forceinline__ T* address(T* data, int operand, int j) const {
    return data +
           (V == 1 ? offset[operand][j] : offset[operand][0] + int64_t(vector_stride[operand]) * (j * V));
  }
};

// Computes the offset of outer index n in each operand. Plans with vectors of 16 bytes have at most one outer
// dimension.
template <bool kIsVectorized, int kOperands>
__device__ __forceinline__ void compute_outer_offsets(const WalkLayout& layout, int64_t n,
                                                      int64_t (&offset)[kOperands]) {
  const bool has_one_dim = kIsVectorized || layout.outer_dims <= 1;
#pragma unroll
  for (int k = 0; k < kOperands; ++k) offset[k] = has_one_dim ? n * layout.strides[k].outer[0] : 0;
  if constexpr (!kIsVectorized) {
#pragma unroll 1
    for (int d = has_one_dim ? -1 : layout.outer_dims - 1; d >= 0; --d) {
      const int64_t size = layout.outer_size[d], quotient = n / size, i = n - quotient * size;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += i * layout.strides[k].outer[d];
      n = quotient;
    }
  }
}

// This block's tile (some channels) and slice (a share of their values), and this thread's team and its place
// in the team. Threads of an incomplete last team have team == plan.teams and no work. The tile is the
// block's first: in a single launch of several rounds it then takes every tiles_at_once-th tile.
struct BlockWork {
  unsigned tile, slice;
  int member, team;

  __device__ __forceinline__ BlockWork(const LaunchPlan& plan, unsigned block) {
    slice = block / plan.tiles_at_once;
    tile = block - slice * plan.tiles_at_once;
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

// Copies this thread's constants from tile_table, which has an entry for each channel of the tile. A thread
// has a constant for each of its columns (rows), or one constant (planes).
template <bool kIsRows, int V, class Constants, int K>
__device__ __forceinline__ void load_thread_constants(Constants (&thread_constants)[K],
                                                      const Constants* tile_table, const LaunchPlan& plan,
                                                      const BlockWork& work) {
  if constexpr (kIsRows) {
    const int last = max(0, work.channels(plan) - 1);  // keeps threads past the last column within the table
    const int column = work.member * V;
    int channel = column, columns_left = 1;  // columns_left: until the next channel begins
    if (plan.columns_per_channel > 1) {
      channel = column / plan.columns_per_channel;
      columns_left = plan.columns_per_channel - (column - channel * plan.columns_per_channel);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      thread_constants[k] = tile_table[min(channel, last)];
      if (--columns_left == 0) ++channel, columns_left = plan.columns_per_channel;
    }
  } else {
    thread_constants[0] = tile_table[0];
  }
}

// Planes: calls body(batch) for this thread's elements of channel work.tile. operand0 is the address of
// operand 0; if V > 1, the 16-byte boundaries of all operands are at the same elements. A unit then has
// `head` single elements up to a boundary, then vectors, then single elements again. If V is 1, each element
// is a vector. Kept in one function: with functions for its parts, some kernels have more instructions.
template <int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void walk_planes(const LaunchPlan& plan, const BlockWork& work,
                                            const void* operand0, const Body& body) {
  if (work.team >= plan.teams) return;
  const WalkLayout& layout = plan.layout;
  const int64_t step = int64_t(plan.slices) * plan.teams;
  for (int64_t i = int64_t(work.slice) * plan.teams + work.team; i < plan.units; i += step) {
    const int64_t unit = kOrder == WalkOrder::descending ? plan.units - 1 - i : i;
    const int64_t outer_index = plan.segments == 1 ? unit : unit / plan.segments;
    const int64_t segment_begin = (unit - outer_index * plan.segments) * plan.segment_length;  // in the plane
    const int64_t left = layout.inner - segment_begin;
    const int length = int(left < plan.segment_length ? left : plan.segment_length);
    int64_t unit_begin[kOperands];
    compute_outer_offsets<(V > 1)>(layout, outer_index, unit_begin);
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      unit_begin[k] += work.tile * layout.strides[k].channel + segment_begin * layout.strides[k].inner;

    int head = 0, vectors = length;
    if constexpr (V > 1) {
      constexpr int kElementBytes = 16 / V;
      const intptr_t address = reinterpret_cast<intptr_t>(operand0) + unit_begin[0] * kElementBytes;
      head = min(length, int(-address & 15) / kElementBytes);
      vectors = (length - head) / V;
      const int single_elements = length - vectors * V;
      for (int e = work.member; e < single_elements; e += plan.team_size) {
        Batch<1, 1, kOperands> single;
        single.valid[0] = true;
#pragma unroll
        for (int k = 0; k < kOperands; ++k)
          single.offset[k][0] = unit_begin[k] + (e < head ? e : e + vectors * V);
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
              unit_begin[k] +
              (V > 1 ? head + vector * V : (vector + j * plan.team_size) * layout.strides[k].inner);
      }
      body(batch);
    }
  }
}

// Rows: calls body(batch) for this thread's V columns of its rows. They begin at column member * V of the
// tile.
template <int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void walk_rows(const LaunchPlan& plan, const BlockWork& work, const Body& body) {
  // Vectors of 16 bytes are planned only if 32 bits suffice for an index (LaunchPlanner::rows_have_vectors).
  using Index = std::conditional_t<(V > 1), unsigned, int64_t>;
  const WalkLayout& layout = plan.layout;
  auto column = Index(work.first_channel(plan) * plan.columns_per_channel + work.member * V);
  if (work.team >= plan.teams || column >= plan.columns) return;
  int64_t column_offset[kOperands];
  int vector_stride[kOperands];
#pragma unroll
  for (int k = 0; k < kOperands; ++k) {
    column_offset[k] =
        int64_t(column) * (V > 1 || plan.columns_per_channel > 1 ? 1 : layout.strides[k].channel);
    vector_stride[k] =
        (kOrder == WalkOrder::descending ? -plan.teams : plan.teams) * int(layout.strides[k].outer[0] / V);
  }
  const unsigned batch_rows = plan.teams * U;  // rows that the block's teams walk in one step
  const Index rows = Index(plan.units), step = plan.slices * batch_rows;
  for (Index i = Index(work.slice) * batch_rows + work.team; i < rows; i += step) {
    Batch<V, U, kOperands> batch;
    const int rows_left = int(min(rows - i, Index(batch_rows)));
#pragma unroll
    for (int j = 0; j < U; ++j) batch.valid[j] = j == 0 || j * plan.teams < rows_left;
#pragma unroll
    for (int j = 0; j < batch.kOffsets; ++j) {
      const Index ascending_row = i + j * plan.teams,
                  row = kOrder == WalkOrder::descending ? rows - 1 - ascending_row : ascending_row;
      int64_t row_offset[kOperands];
      if constexpr (V > 1) {
#pragma unroll
        for (int k = 0; k < kOperands; ++k)
          row_offset[k] = uint64_t(row) * unsigned(layout.strides[k].outer[0]);
      } else {
        compute_outer_offsets<false>(layout, row, row_offset);
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) batch.offset[k][j] = row_offset[k] + column_offset[k];
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) batch.vector_stride[k] = vector_stride[k];
    body(batch);
  }
}

// Calls body(batch) for all elements of this thread, in batches of U vectors. For planes it also calls body
// with batches of one element, where an element belongs to no whole vector; operand0, the address of operand
// 0, tells where vectors begin.
template <bool kIsRows, int V, int U, int kOperands, WalkOrder kOrder, class Body>
__device__ __forceinline__ void for_each_batch(const LaunchPlan& plan, const BlockWork& work,
                                               const void* operand0, const Body& body) {
  if constexpr (kIsRows)
    walk_rows<V, U, kOperands, kOrder>(plan, work, body);
  else
    walk_planes<V, U, kOperands, kOrder>(plan, work, operand0, body);
}

}  // namespace fastvit
