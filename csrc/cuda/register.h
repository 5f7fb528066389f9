// The ops that CUDA implements, for the library and for the builds of it that run without a GPU.
#pragma once

#include "../register.h"
#include "peer.h"

namespace fastvit {

template <class Library>
void implement_cuda(Library& m) {
  implement_ops(m);
  m.impl("peer_share", TORCH_BOX(&cuda_peer_share));
  m.impl("message_pack", TORCH_BOX(&message_pack));
  m.impl("message_merge", TORCH_BOX(&message_merge));
}

}  // namespace fastvit
