// Rows of a LayerNorm: which threads take which columns (row_plan.h), and sums over a row.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "host.h"
#include "row_plan.h"

namespace fastvit {

template <int V, int K>
struct RowLane {  // this thread in its team
  int lane, team, lanes;
  int packets;  // in a row

  __device__ __forceinline__ explicit RowLane(const RowPlan& plan) : lanes(plan.lanes) {
    team = int(threadIdx.x) / lanes;
    lane = int(threadIdx.x) - team * lanes;
    packets = int(plan.columns / V);
  }
  // f(j, first column) for the packets of a part; j is known when it is compiled.
  template <class F>
  __device__ __forceinline__ void each(int part, const F& f) const {
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const int packet = (part * K + j) * lanes + lane;
      if (packet < packets) f(j, int64_t(packet) * V);
    }
  }
};

// A lane's columns of weight or bias, in the type of the arithmetic.
template <class A, int V, int K>
struct ColumnTable {
  A at[K][V];

  __device__ __forceinline__ void load(const RowLane<V, K>& mine, int part, const ChannelArray& from,
                                       A absent) {
    mine.each(part, [&](int j, int64_t column) {
#pragma unroll
      for (int k = 0; k < V; ++k) at[j][k] = A(from.read(column + k, double(absent)));
    });
  }
};

// Makes each of v its sum over the lanes of a team, in all of them to the same bits. All threads of the block
// call.
template <class A, int kNumbers>
__device__ __forceinline__ void sum_team(A (&v)[kNumbers], int lanes) {
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

// f.template operator()<T, G>() for the types of x and of y.
template <class F>
void with_row_types(ScalarType dtype, ScalarType output_dtype, const F& f) {
  with_type(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, float>)
      with_type(output_dtype, [&]<class G>() {
        if constexpr (sizeof(G) <= sizeof(T)) f.template operator()<T, G>();
      });
    else
      f.template operator()<T, T>();
  });
}

// f.template operator()<V>(): elements in a packet, by what both types have room for in 16 bytes and the rows
// begin with; one element where they do not.
template <class T, class G, class F>
void with_row_width(int64_t columns, std::initializer_list<const void*> pointers, const F& f) {
  constexpr int V = kVector<T> < kVector<G> ? kVector<T> : kVector<G>;
  bool aligned = columns % V == 0;
  for (const void* p : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  aligned ? f.template operator()<V>() : f.template operator()<1>();
}

// As many blocks as run at once, which take the rows in turns.
template <class... Parameters>
int64_t row_blocks(const Device& device, void (*kernel)(Parameters...), const RowPlan& plan) {
  const int64_t resident = blocks_of(device, reinterpret_cast<const void*>(kernel));
  return std::min(ceil_div(plan.rows, plan.teams()), resident * device.limits.multiprocessors);
}

}  // namespace fastvit
