// The CUDA implementations of the ops, registered for CPU tensors under a namespace of their own; redirect.py
// defines its schemas.
#include "../../csrc/act.h"
#include "../../csrc/backward.h"
#include "../../csrc/cuda/backend.h"
#include "../../csrc/forward.h"
#include "../../csrc/layer_norm.h"
#include "../../csrc/reduce.h"
#include "../../csrc/stats.h"
#include "../../csrc/sync/cuda_peer.h"
#include "../../csrc/sync/message.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit_cuda_host, CPU, m) {
  fastvit::StatsOps<fastvit::Cuda>::implement(m);
  fastvit::ForwardOps<fastvit::Cuda>::implement(m);
  fastvit::ReduceOps<fastvit::Cuda>::implement(m);
  fastvit::BackwardOps<fastvit::Cuda>::implement(m);
  fastvit::LayerNormOps<fastvit::Cuda>::implement(m);
  fastvit::ActOps<fastvit::Cuda>::implement(m);
  m.impl("peer_share", TORCH_BOX(&fastvit::cuda_peer_share));
  fastvit::implement_messages<fastvit::CudaMessages>(m);
}
