// implement_cuda: registers the implementations of the ops of CUDA tensors. register_cuda.cu calls it for the
// library, and the tests call it for a test build in which the kernels run on the CPU.
#pragma once

#include "../register_ops.h"
#include "exchange_ops.h"

namespace fastvit {

// Library: torch::stable's registrar of implementations for one dispatch key.
template <class Library>
void implement_cuda(Library& library) {
  implement_common_ops(library);
  library.impl("exchange_merge", TORCH_BOX(&cuda_exchange_merge));
  library.impl("pack_message", TORCH_BOX(&pack_message));
  library.impl("merge_messages", TORCH_BOX(&merge_messages));
}

}  // namespace fastvit
