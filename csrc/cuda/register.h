// The ops that CUDA implements, for the library and for the builds of it that run without a GPU.
#pragma once

#include "../act.h"
#include "../backward.h"
#include "../forward.h"
#include "../layer_norm.h"
#include "../reduce.h"
#include "../stats.h"
#include "../sync/message.h"
#include "backend.h"
#include "peer.h"

namespace fastvit {

template <class Library>
void implement_ops(Library& m) {
  StatsOps<Cuda>::implement(m);
  ForwardOps<Cuda>::implement(m);
  ReduceOps<Cuda>::implement(m);
  BackwardOps<Cuda>::implement(m);
  LayerNormOps<Cuda>::implement(m);
  ActOps<Cuda>::implement(m);
}

template <class Library>
void implement_exchanges(Library& m) {
  m.impl("peer_share", TORCH_BOX(&cuda_peer_share));
  implement_messages<CudaMessages>(m);
}

}  // namespace fastvit
