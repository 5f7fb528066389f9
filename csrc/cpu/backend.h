// The CPU backend of the ops; arguments.h defines the arguments.
#pragma once

#include "../arguments.h"

namespace fastvit {

struct Cpu {
  static void stats(const StatsArgs& args);
  static void forward(const ForwardArgs& args);
  static void reduce(const ReduceArgs& args);
  static void backward(const BackwardArgs& args);
  // No launch to save on a CPU: the two ops run one after the other.
  static bool local_forward(const ForwardArgs&) { return false; }
  static bool local_backward(const BackwardArgs&) { return false; }
  static void layer_norm_forward(const LayerNormForwardArgs& args);
  static void layer_norm_backward(const LayerNormBackwardArgs& args);
  static void act(const ActArgs& args);
};

// The instruction set of the chosen kernels: avx512, avx2 or baseline (the compiler's default).
const char* cpu_capability();

}  // namespace fastvit
