// For LayerNorm's kernels: which threads take which columns of a row; weight and bias; sums over a row.
//
// A team of threads, a power of two up to the whole block, takes a row. Each member keeps up to 32 columns in
// registers, so that the row is read from memory once. 24 columns suit vision transformers: 16 members for a
// row of 384 columns, a warp for 768. A row that exceeds a block's registers, or kMaxTableColumns columns, is
// taken in several passes by a team of the whole block: in each pass the team loads the next columns. Every
// walk over such a row reads it from memory again.
//
// A: type of the arithmetic, double for rows of double and float for all others. V: elements of a vector.
// K: vectors of a member in one pass.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "../layer_norm.h"
#include "channel_vector.cuh"
#include "launch.cuh"

namespace fastvit {

struct RowPlan {
  int64_t rows, columns;
  int team_size;           // threads
  int columns_per_member;  // in one pass
  int passes;              // 1: the row stays in registers

  FASTVIT_HOST_DEVICE int teams() const { return kThreads / team_size; }  // of a block
  FASTVIT_HOST_DEVICE int64_t columns_per_pass() const { return int64_t(team_size) * columns_per_member; }
};

// Columns per member: two choices, which may be equal. Backward has fewer columns, because it keeps two sums
// per column in registers. layer_norm_backward.cu has its choices for __half.
constexpr int kForwardColumnChoices[] = {24, 32};
template <class T>
constexpr int kBackwardColumnChoices[] = {16, sizeof(T) == 2 ? 24 : 16};
// Columns per member if values or addresses take more registers: for double, and for vectors of one element.
template <class A, int V>
constexpr int kFewColumns = sizeof(A) == 8 && V == 1 ? 4 : 8;
constexpr int kMaxTableColumns = 4096;  // longest row whose weight and bias fit into a block's shared memory

// Takes the choice whose passes cover the fewest columns beyond the row's end. If both cover the same number,
// takes the first, which needs fewer registers.
template <class A, int V>
RowPlan choose_row_plan(int64_t rows, int64_t columns, const int (&column_choices)[2]) {
  const auto plan_for = [&](int columns_per_member) {
    RowPlan plan{rows, columns, /*team_size=*/1, columns_per_member, /*passes=*/1};
    while (plan.team_size < kThreads && plan.columns_per_pass() < columns) plan.team_size *= 2;
    plan.passes = int(ceil_div(columns, plan.columns_per_pass()));
    // Tables of weight and bias exist only for rows of one pass, so a row beyond their size takes two.
    if (columns > kMaxTableColumns && plan.passes == 1) plan.passes = 2;
    return plan;
  };
  if (sizeof(A) == 8 || V == 1) return plan_for(kFewColumns<A, V>);
  const RowPlan narrow = plan_for(column_choices[0]), wide = plan_for(column_choices[1]);
  return narrow.columns_per_pass() * narrow.passes <= wide.columns_per_pass() * wide.passes ? narrow : wide;
}

// This thread as a member of its team.
template <int V, int K>
struct TeamMember {
  int index;        // of this thread in its team
  int team;         // index of the team in the block
  int team_size;    // threads
  int row_vectors;  // vectors of a row

  __device__ __forceinline__ explicit TeamMember(const RowPlan& plan) : team_size(plan.team_size) {
    team = int(threadIdx.x) / team_size;
    index = int(threadIdx.x) - team * team_size;
    row_vectors = int(plan.columns / V);
  }
  // Calls f(j, column) for each of this thread's vectors of the pass: its number j < K, and its first column.
  // The loop is unrolled, so j can be the index of a register.
  template <class F>
  __device__ __forceinline__ void for_each_vector(int pass, const F& f) const {
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const int vector = (pass * K + j) * team_size + index;
      if (vector < row_vectors) f(j, vector * V);
    }
  }
};

// Weight or bias in the type of the arithmetic. If a row takes one pass, a block copies the weight or bias to
// shared memory: first the first 16 bytes of every vector, then the second 16 bytes of every vector, and so
// on, so that the threads of a warp access consecutive memory, without bank conflicts. Otherwise it stays in
// global memory.
template <class A, int V>
class ColumnTable {
  static constexpr int kAccessWidth =
      V < kVectorWidth<A> ? V : kVectorWidth<A>;  // numbers in an access of 16 bytes
  const ChannelVector& source;
  const A default_value;  // if there is no weight or no bias
  A* const table;         // null: the numbers stay in global memory
  const int row_vectors;

  // Returns the address of the access that holds number k of a vector.
  __device__ __forceinline__ A* address(int vector, int k) const {
    return table + (k / kAccessWidth * row_vectors + vector) * kAccessWidth;
  }

 public:
  // `shared` holds one or two tables of plan.columns numbers; this is number table_index. All threads call
  // fill() before they synchronize.
  __device__ __forceinline__ ColumnTable(const ChannelVector& source, A default_value, unsigned char* shared,
                                         int table_index, const RowPlan& plan)
      : source(source),
        default_value(default_value),
        table(plan.passes > 1 ? nullptr : reinterpret_cast<A*>(shared) + table_index * plan.columns),
        row_vectors(int(plan.columns / V)) {}

  __device__ __forceinline__ void fill() const {
    for (int vector = int(threadIdx.x); table && vector < row_vectors; vector += kThreads) {
      A values[V];
      load_channels<V>(source, int64_t(vector) * V, values, default_value);
#pragma unroll
      for (int k = 0; k < V; ++k) address(vector, k)[k % kAccessWidth] = values[k];
    }
  }
  // The numbers of the vector that begins at `column`.
  __device__ __forceinline__ void load(int column, A (&values)[V]) const {
    if (!table) return load_channels<V>(source, column, values, default_value);
#pragma unroll
    for (int first = 0; first < V; first += kAccessWidth) {
      using Access = Vector<A, kAccessWidth>;
      Access access = *reinterpret_cast<const Access*>(address(column / V, first));
#pragma unroll
      for (int k = 0; k < kAccessWidth; ++k) values[first + k] = access.element[k];
    }
  }
};

template <class A>
size_t column_table_bytes(const RowPlan& plan) {
  return plan.passes > 1 ? 0 : size_t(plan.columns) * sizeof(A);
}

// Replaces each value by its sum over the members of the team, with the same bits in all members. All threads
// of the block must call it.
template <class A, int kValues>
__device__ __forceinline__ void sum_over_team(A (&values)[kValues], int team_size) {
  for (int offset = min(team_size, 32) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
  }
  if (team_size <= 32) return;
  __shared__ A warp_sums[kValues][kThreads / 32];
  __syncthreads();  // every thread has read the sums of the previous call
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) warp_sums[i][threadIdx.x / 32] = values[i];
  }
  __syncthreads();
  const int first_warp = int(threadIdx.x) / team_size * (team_size / 32);  // of the team
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = 0;
    for (int warp = 0; warp < team_size / 32; ++warp) values[i] += warp_sums[i][first_warp + warp];
  }
}

// Calls f.template operator()<V, K>(plan). T: type of x and dx. Y: type of y and dy. V elements of the larger
// type are 16 bytes. V is 1 if a row is not whole vectors, or if a tensor begins between 16-byte boundaries.
// A member has as many columns as one of kColumnChoices, or kFewColumns for double and for V = 1.
template <class T, class Y, const int (&kColumnChoices)[2], class F>
void dispatch_row_plan(int64_t rows, int64_t columns, std::initializer_list<const void*> pointers,
                       const F& f) {
  using A = Accumulation<T>;
  constexpr int V = kVectorWidth<T> < kVectorWidth<Y> ? kVectorWidth<T> : kVectorWidth<Y>;
  bool is_aligned = columns % V == 0;
  for (const void* pointer : pointers)
    is_aligned = is_aligned && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  if (!is_aligned) {
    const RowPlan plan = choose_row_plan<A, 1>(rows, columns, kColumnChoices);
    return f.template operator()<1, kFewColumns<A, 1>>(plan);
  }
  const RowPlan plan = choose_row_plan<A, V>(rows, columns, kColumnChoices);
  if constexpr (sizeof(A) == 8)
    f.template operator()<V, kFewColumns<A, V> / V>(plan);
  else if (plan.columns_per_member == kColumnChoices[0])
    f.template operator()<V, kColumnChoices[0] / V>(plan);
  else
    f.template operator()<V, kColumnChoices[1] / V>(plan);
}

// A launch of at most as many blocks as run at once without dynamic shared memory; each takes rows in turn.
// If the tables of long rows leave room for fewer blocks, the remaining blocks run later.
template <class... Parameters>
LaunchConfig make_row_launch(const LaunchContext& context, void (*kernel)(Parameters...), const RowPlan& plan,
                             size_t shared_bytes) {
  const int64_t resident = count_resident_blocks(context, reinterpret_cast<const void*>(kernel));
  const int64_t max_blocks = resident * context.limits.multiprocessors;
  return {std::min(ceil_div(plan.rows, plan.teams()), max_blocks), context, shared_bytes};
}

}  // namespace fastvit
