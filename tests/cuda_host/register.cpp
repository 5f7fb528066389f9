// The CUDA implementations of the ops, registered for CPU tensors under a namespace of their own; redirect.py
// defines its schemas.
#include "../../csrc/cuda/register_cuda.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit_cuda_host, CPU, m) {
  fastvit::implement_cuda(m);
}
