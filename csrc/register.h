// Registers a library's implementations of the ops of ops.cpp.
#pragma once

#include <torch/csrc/stable/library.h>

#include "act.h"
#include "backward.h"
#include "forward.h"
#include "layer_norm.h"

namespace fastvit {

template <class Library>
void implement_ops(Library& m) {
  m.impl("bn_stats", TORCH_BOX(&bn_stats));
  m.impl("bn_forward", TORCH_BOX(&bn_forward));
  m.impl("abn_forward", TORCH_BOX(&abn_forward));
  m.impl("abn_forward_", TORCH_BOX(&abn_forward_));
  m.impl("bn_apply", TORCH_BOX(&bn_apply));
  m.impl("bn_reduce", TORCH_BOX(&bn_reduce));
  m.impl("abn_reduce", TORCH_BOX(&abn_reduce));
  m.impl("bn_backward", TORCH_BOX(&bn_backward));
  m.impl("abn_backward", TORCH_BOX(&abn_backward));
  m.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("act_forward", TORCH_BOX(&act_forward));
  m.impl("act_backward", TORCH_BOX(&act_backward));
  m.impl("glu_forward", TORCH_BOX(&glu_forward));
  m.impl("glu_backward", TORCH_BOX(&glu_backward));
}

}  // namespace fastvit
