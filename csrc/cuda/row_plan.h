// Divides the rows of a LayerNorm among threads.
//
// A row is taken by a team of `lanes` threads, a power of two up to the block; a block has several teams, or
// one. A lane holds its vectors of a row in registers, so that the row is read once: 24 or 32 columns, of
// which 24 fit the widths of ViTs, 16 lanes for 384 and a warp for 768. A row too long for a block's
// registers is taken part by part, and read again for each pass over it.
#pragma once

#include <cstdint>

#include "../macros.h"
#include "plan.h"

namespace fastvit {

struct RowPlan {
  int64_t rows, columns;
  int lanes;  // of a team
  int held;   // columns of a lane
  int parts;  // of a row; 1: it stays in registers

  FASTVIT_INLINE int teams() const { return kThreads / lanes; }
};

// Columns of a lane, two choices: the backward's sums take two registers a column, its operands one or two.
constexpr int kForwardColumns[] = {24, 32};
template <class T>
constexpr int kBackwardColumns[] = {16, sizeof(T) == 2 ? 24 : 16};
// Of double, or of single elements, whose addresses take registers too.
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

}  // namespace fastvit
