// The ops that CUDA implements, for the library and for the builds of it that run without a GPU.
#pragma once

#include "../register_ops.h"
#include "exchange_ops.h"

namespace fastvit {

template <class Library>
void implement_cuda(Library& m) {
  implement_ops(m);
  m.impl("exchange_merge", TORCH_BOX(&cuda_exchange_merge));
  m.impl("pack_message", TORCH_BOX(&pack_message));
  m.impl("merge_messages", TORCH_BOX(&merge_messages));
}

}  // namespace fastvit
