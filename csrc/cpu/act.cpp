// act_forward, glu_forward, act_backward, glu_backward on the CPU.
#include "backend.h"
#include "kernels.h"

namespace fastvit {

void Cpu::act_forward(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act_forward({args, partition_of(args.layout)});
}

void Cpu::act_backward(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act_backward({args, partition_of(args.layout)});
}

}  // namespace fastvit
