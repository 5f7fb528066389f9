// Messages of collectives on the CPU.
#pragma once

#include "../message.h"

namespace fastvit {

struct CpuMessages {
  static void pack(const message::Packing& packing) {
    packing.kinds.call([&]<class A, class M>() {
      for (int64_t i = 0; i < packing.size(); ++i) packing.write<A, M>(i);
    });
  }
  static void unpack(const message::Unpacking& unpacking) {
    unpacking.kinds.call([&]<class A, class M>() {
      bool good = true;
      for (int64_t rank = 0; rank < unpacking.ranks(); ++rank) good &= unpacking.fits<M>(rank);
      for (int64_t i = 0; i < unpacking.rows * unpacking.n; ++i) unpacking.write<A, M>(i, good);
      if (!good) *unpacking.report = unpacking.mismatch<M>();
    });
  }
};

}  // namespace fastvit
