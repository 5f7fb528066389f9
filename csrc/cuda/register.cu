// The CUDA implementations of the ops, whose schemas stand in ops.cpp.
#include "../frontend.h"
#include "../message_ops.h"
#include "backend.h"
#include "exchange.h"
#include "ipc.h"
#include "message.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit, CUDA, m) {
  fastvit::Frontend<fastvit::Cuda>::implement(m);
  fastvit::implement_exchange(m);
  fastvit::implement_messages<fastvit::CudaMessages>(m);
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("ipc_memory", TORCH_BOX(&fastvit::ipc_memory));
  m.impl("ipc_open", TORCH_BOX(&fastvit::ipc_open));
}
