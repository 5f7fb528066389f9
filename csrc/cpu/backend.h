// The CPU backend of the ops: see arguments.h for what each function is given.
#pragma once

#include "../arguments.h"

namespace fastvit {

struct Cpu {
  static void stats(const StatsArgs& args);
  static void forward(const ForwardArgs& args);
  static void reduce(const ReduceArgs& args);
  static void backward(const BackwardArgs& args);
  // Two passes over memory are two kernels here, with nothing to launch.
  static bool local_forward(const ForwardArgs&) { return false; }
  static bool local_backward(const BackwardArgs&) { return false; }
  static void layer_norm_forward(const LayerNormForwardArgs& args);
  static void layer_norm_backward(const LayerNormBackwardArgs& args);
  static void act_forward(const ActArgs& args);
  static void act_backward(const ActArgs& args);
};

// The instruction set the kernels run with: avx512, avx2 or baseline (what the compiler targets by itself).
const char* cpu_capability();

}  // namespace fastvit
