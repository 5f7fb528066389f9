// The CUDA implementations of the ops, registered for CPU tensors under a namespace of their own; redirect.py
// defines its schemas.
#include "../../csrc/cuda/backend.h"
#include "../../csrc/cuda/exchange.h"
#include "../../csrc/cuda/message.h"
#include "../../csrc/frontend.h"
#include "../../csrc/message_ops.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit_cuda_host, CPU, m) {
  fastvit::Frontend<fastvit::Cuda>::implement(m);
  fastvit::implement_exchange(m);
  fastvit::implement_messages<fastvit::CudaMessages>(m);
}
