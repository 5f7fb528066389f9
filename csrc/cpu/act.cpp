// act_forward, act_backward, glu_forward, glu_backward on the CPU: all of the work is the kernels'.
#include "kernels.h"

namespace fastvit {

void Backend::act(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act({args, partition_of(args.layout)});
}

}  // namespace fastvit
