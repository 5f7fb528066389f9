// The CUDA backend of the ops; arguments.h defines the arguments.
#pragma once

#include "../arguments.h"

namespace fastvit {

struct Cuda {
  static void stats(const StatsArgs& args);
  static void forward(const ForwardArgs& args);
  static void reduce(const ReduceArgs& args);
  static void backward(const BackwardArgs& args);
  static bool local_forward(const ForwardArgs& args);
  static bool local_backward(const BackwardArgs& args);
  static void layer_norm_forward(const LayerNormForwardArgs& args);
  static void layer_norm_backward(const LayerNormBackwardArgs& args);
  static void act(const ActArgs& args);
};

}  // namespace fastvit
