// act_forward, glu_forward, act_backward, glu_backward on the CPU.
#include "backend.h"
#include "kernels.h"

namespace fastvit {

void Cpu::act(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act({args, partition_of(args.layout)});
}

}  // namespace fastvit
