// Messages of collectives on GPUs: see ../message_ops.h.
#pragma once

#include "../message.h"

namespace fastvit {

struct CudaMessages {
  static void pack(const message::Packing& packing);
  static void unpack(const message::Unpacking& unpacking);
};

}  // namespace fastvit
