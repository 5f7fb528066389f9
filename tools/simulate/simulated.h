// The GPU that the planner is told of, and what the driver asks about its simulation.
#pragma once

#include <cstddef>

constexpr int kSimulatedMultiprocessors = 16;
constexpr int kSimulatedSharedBytes = 228 << 10;  // of a multiprocessor, as an H200's

size_t simulated_kernels();   // launched so far, each counted once
size_t simulated_together();  // launches so far whose blocks wait for each other
