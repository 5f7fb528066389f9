// implement_common_ops registers the ops that both libraries, _C.so for CPUs and _cuda.so, implement from the
// same headers; each library has its own kernels.
#pragma once

#include "activation_ops.h"
#include "batch_norm.h"
#include "layer_norm.h"

namespace fastvit {

// Library: the type that STABLE_TORCH_LIBRARY_IMPL declares, for one dispatch key.
template <class Library>
void implement_common_ops(Library& m) {
  m.impl("bn_stats", call_op<bn_stats>);
  m.impl("bn_forward", call_op<bn_forward>);
  m.impl("bn_forward_inplace", call_op<bn_forward_inplace>);
  m.impl("bn_apply", call_op<bn_apply>);
  m.impl("bn_reduce", call_op<bn_reduce>);
  m.impl("bn_backward", call_op<bn_backward>);
  m.impl("layer_norm_forward", call_op<layer_norm_forward>);
  m.impl("layer_norm_backward", call_op<layer_norm_backward>);
  m.impl("act_forward", call_op<act_forward>);
  m.impl("act_backward", call_op<act_backward>);
}

}  // namespace fastvit
