// act_forward, act_backward on the CPU: all of the work is the kernels'.
#include "kernels.h"

namespace fastvit {

void backend::act_forward(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act({args, partition_of(args.layout)});
}
void backend::act_backward(const ActArgs& args) {
  act_forward(args);
}

}  // namespace fastvit
