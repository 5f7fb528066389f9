// act_forward and act_backward on the CPU: one kernel computes both; it is a backward if args.dy is not null.
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
