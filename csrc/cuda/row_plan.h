// Divides the rows of a LayerNorm among threads. Plain C++, so that benchmarks/predict.py plans without CUDA.
//
// A row is taken by a team of `lanes` threads, a power of two up to the block; a block has several teams, or
// one. A lane keeps its kPackets packets of a row in registers, so that the row is read once. A row too long
// for a block's registers is taken part by part, and read again for each pass over it.
#pragma once

#include <cstdint>

#include "../macros.h"
#include "threads.h"

namespace fastvit {

struct RowPlan {
  int64_t rows, columns;
  int lanes;  // of a team
  int parts;  // of a row; 1: it stays in registers

  FASTVIT_INLINE int teams() const { return kThreads / lanes; }
};

// Packets of a row that a lane holds: 16 columns, whose sums take two registers each; 8 of double, or of
// single elements, whose addresses take registers too.
template <class A, int V>
constexpr int kPackets = (sizeof(A) == 8 ? 8 : 16) / (V == 1 ? 2 : V);

template <class A, int V>
RowPlan row_plan(int64_t rows, int64_t columns) {
  const int64_t packets = columns / V, wanted = (packets + kPackets<A, V> - 1) / kPackets<A, V>;
  RowPlan plan{rows, columns, 1, 1};
  while (plan.lanes < kThreads && plan.lanes < wanted) plan.lanes *= 2;
  plan.parts = int((wanted + plan.lanes - 1) / plan.lanes);
  return plan;
}

}  // namespace fastvit
