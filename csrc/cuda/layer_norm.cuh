// Rows of a LayerNorm: which threads take which columns, weight and bias, and sums over a row.
//
// A row is taken by a team of `lanes` threads, a power of two up to the block; a block has several teams, or
// one. A lane holds 24 or 32 columns of a row in registers, so that the row is read once. 24 fit ViTs:
// 16 lanes for 384 columns, a warp for 768. A row too long for a block's
// registers is taken part by part, and read again for each pass over it.
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
  int lanes;  // of a team
  int held;   // columns of a lane
  int parts;  // of a row; 1: it stays in registers

  FASTVIT_HOST_DEVICE int teams() const { return kThreads / lanes; }
};

// Two choices of columns per lane. Backward has fewer: its sums take two registers a column.
constexpr int kForwardColumns[] = {24, 32};
template <class T>
constexpr int kBackwardColumns[] = {16, sizeof(T) == 2 ? 24 : 16};
// Columns per lane for double, and for vectors of one element, whose addresses also take registers.
template <class A, int V>
constexpr int kSparingColumns = sizeof(A) == 8 && V == 1 ? 4 : 8;
constexpr int kTableColumns = 4096;  // longest row whose weight and bias a block keeps in shared memory

// For vectors of V columns: the fewest idle lanes, then the fewest registers.
template <class A, int V>
RowPlan row_plan(int64_t rows, int64_t columns, const int (&choices)[2]) {
  const auto plan = [&](int held) {
    RowPlan plan{rows, columns, 1, held, 1};
    while (plan.lanes < kThreads && plan.lanes * held < columns) plan.lanes *= 2;
    plan.parts = int((columns + plan.lanes * held - 1) / (plan.lanes * held));
    if (columns > kTableColumns && plan.parts == 1) plan.parts = 2;
    return plan;
  };
  if (sizeof(A) == 8 || V == 1) return plan(kSparingColumns<A, V>);
  const RowPlan few = plan(choices[0]), many = plan(choices[1]);
  const int64_t of_few = int64_t(few.lanes) * few.held * few.parts;
  return of_few <= int64_t(many.lanes) * many.held * many.parts ? few : many;
}

template <int V, int K>
struct TeamMember {  // this thread in its team
  int lane, team, lanes;
  int vectors;  // in a row

  __device__ __forceinline__ explicit TeamMember(const RowPlan& plan) : lanes(plan.lanes) {
    team = int(threadIdx.x) / lanes;
    lane = int(threadIdx.x) - team * lanes;
    vectors = int(plan.columns / V);
  }
  // f(j, first column) for the vectors of a part; j is known when it is compiled.
  template <class F>
  __device__ __forceinline__ void each(int part, const F& f) const {
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const int vector = (part * K + j) * lanes + lane;
      if (vector < vectors) f(j, vector * V);
    }
  }
};

// Weight or bias in the type of the arithmetic: in shared memory, where a row is not taken in parts. There
// the 16-byte units of all vectors lie side by side, so that a warp's accesses have no bank conflicts.
template <class A, int V>
class ColumnTable {
  static constexpr int kUnit = V < kVectorWidth<A> ? V : kVectorWidth<A>;
  const ChannelVector& from;
  const A absent;
  A* const table;  // null: in global memory
  const int vectors;

  __device__ __forceinline__ A* unit(int vector, int first) const {
    return table + (first / kUnit * vectors + vector) * kUnit;
  }

 public:
  // `number` 0 or 1: which of the tables in `shared`. All threads call fill() before they synchronise.
  __device__ __forceinline__ ColumnTable(const ChannelVector& from, A absent, unsigned char* shared,
                                         int number, const RowPlan& plan)
      : from(from),
        absent(absent),
        table(plan.parts > 1 ? nullptr : reinterpret_cast<A*>(shared) + number * plan.columns),
        vectors(int(plan.columns / V)) {}

  __device__ __forceinline__ void fill() const {
    for (int vector = int(threadIdx.x); table && vector < vectors; vector += kThreads) {
      A values[V];
      load_channels<V>(from, int64_t(vector) * V, values, absent);
#pragma unroll
      for (int k = 0; k < V; ++k) unit(vector, k)[k % kUnit] = values[k];
    }
  }
  __device__ __forceinline__ void get(int column, A (&to)[V]) const {
    if (!table) return load_channels<V>(from, column, to, absent);
#pragma unroll
    for (int first = 0; first < V; first += kUnit) {
      Vector<A, kUnit> vector = *reinterpret_cast<const Vector<A, kUnit>*>(unit(column / V, first));
#pragma unroll
      for (int k = 0; k < kUnit; ++k) to[first + k] = vector.element[k];
    }
  }
};

template <class A>
size_t table_bytes(const RowPlan& plan) {
  return plan.parts > 1 ? 0 : size_t(plan.columns) * sizeof(A);
}

// Makes each of v its sum over the lanes of a team, with the same bits in all of them. All threads of the
// block call.
template <class A, int kNumbers>
__device__ __forceinline__ void sum_over_team(A (&v)[kNumbers], int lanes) {
  for (int offset = min(lanes, 32) / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], offset);
  }
  if (lanes <= 32) return;
  __shared__ A warps[kNumbers][kThreads / 32];
  __syncthreads();  // every thread has read the previous sums
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) warps[i][threadIdx.x / 32] = v[i];
  }
  __syncthreads();
  const int first = int(threadIdx.x) / lanes * (lanes / 32);
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    v[i] = 0;
    for (int w = 0; w < lanes / 32; ++w) v[i] += warps[i][first + w];
  }
}

// f.template operator()<V, K>(plan). V: elements of a vector, as many as both types fit into 16 bytes, or 1
// where rows do not begin at 16-byte boundaries. K: vectors of a lane, which holds one of kChoices columns.
template <class T, class Y, const int (&kChoices)[2], class F>
void dispatch_row_plan(int64_t rows, int64_t columns, std::initializer_list<const void*> pointers,
                       const F& f) {
  using A = Accumulation<T>;
  constexpr int V = kVectorWidth<T> < kVectorWidth<Y> ? kVectorWidth<T> : kVectorWidth<Y>;
  bool aligned = columns % V == 0;
  for (const void* p : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  if (!aligned) {
    const RowPlan plan = row_plan<A, 1>(rows, columns, kChoices);
    return f.template operator()<1, kSparingColumns<A, 1>>(plan);
  }
  const RowPlan plan = row_plan<A, V>(rows, columns, kChoices);
  if constexpr (sizeof(A) == 8)
    f.template operator()<V, kSparingColumns<A, V> / V>(plan);
  else if (plan.held == kChoices[0])
    f.template operator()<V, kChoices[0] / V>(plan);
  else
    f.template operator()<V, kChoices[1] / V>(plan);
}

// The blocks that run at once without dynamic shared memory; each takes rows in turn. Where the tables of
// long rows leave room for fewer, the others run after them.
template <class... Parameters>
LaunchConfig row_launch(const LaunchContext& context, void (*kernel)(Parameters...), const RowPlan& plan,
                        size_t shared) {
  const int64_t resident = resident_blocks_of(context, reinterpret_cast<const void*>(kernel));
  const int64_t most = resident * context.limits.multiprocessors;
  return {std::min(ceil_div(plan.rows, plan.teams()), most), context, shared};
}

}  // namespace fastvit
