// Registers the CUDA implementations of the ops; ops.cpp has their schemas.
#include "../act.h"
#include "../backward.h"
#include "../forward.h"
#include "../layer_norm.h"
#include "../reduce.h"
#include "../stats.h"
#include "../sync/cuda_peer.h"
#include "../sync/message.h"
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit, CUDA, m) {
  fastvit::StatsOps<fastvit::Cuda>::implement(m);
  fastvit::ForwardOps<fastvit::Cuda>::implement(m);
  fastvit::ReduceOps<fastvit::Cuda>::implement(m);
  fastvit::BackwardOps<fastvit::Cuda>::implement(m);
  fastvit::LayerNormOps<fastvit::Cuda>::implement(m);
  fastvit::ActOps<fastvit::Cuda>::implement(m);
  m.impl("peer_share", TORCH_BOX(&fastvit::cuda_peer_share));
  fastvit::implement_messages<fastvit::CudaMessages>(m);
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("ipc_memory", TORCH_BOX(&fastvit::ipc_memory));
}
