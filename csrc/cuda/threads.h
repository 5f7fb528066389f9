// Constants of the planner, the kernels and their launchers; plain C++.
#pragma once

namespace fastvit {

constexpr int kThreads = 256;     // per block, in every kernel
constexpr int kResident = 2;      // launch bound: blocks that a multiprocessor can hold; leaves 128 registers
constexpr int kOnChipBlocks = 2;  // blocks that share a multiprocessor's shared memory in local ops
static_assert(kOnChipBlocks <= kResident);

}  // namespace fastvit
