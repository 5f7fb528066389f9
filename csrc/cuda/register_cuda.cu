// Registers the CUDA implementations of the ops; ops.cpp has their schemas.
#include "register_cuda.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit, CUDA, m) {
  fastvit::implement_cuda(m);
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("ipc_allocate", TORCH_BOX(&fastvit::ipc_allocate));
  m.impl("ipc_open", TORCH_BOX(&fastvit::ipc_open));
}
