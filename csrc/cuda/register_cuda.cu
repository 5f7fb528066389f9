// Registers the CUDA implementations of the ops, which ops.cpp defines.
#include "register_cuda.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit, CUDA, library) {
  fastvit::implement_cuda(library);
}

// The ops for GPU memory that processes share (CUDA IPC). They take no CUDA tensor, so they are registered
// for every device.
STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, library) {
  library.impl("ipc_allocate", TORCH_BOX(&fastvit::ipc_allocate));
  library.impl("ipc_open", TORCH_BOX(&fastvit::ipc_open));
}
