// act_forward and act_backward on the CPU: the kernel does all of the work, and is the same for both.
#include "kernel_table.h"

namespace fastvit {
namespace {

void run_act_kernel(const ActArgs& args) {
  if (args.layout.numel() > 0) kernel_table().act({args, plan_cpu_work(args.layout)});
}

}  // namespace

void backend::act_forward(const ActArgs& args) {
  run_act_kernel(args);
}
void backend::act_backward(const ActArgs& args) {
  run_act_kernel(args);
}

}  // namespace fastvit
