// act_forward, act_backward on the CPU: all of the work is the kernels', one for both.
#include "kernel_table.h"

namespace fastvit {
namespace {

void run(const ActArgs& args) {
  if (args.layout.numel() > 0) kernel_table().act({args, plan_cpu_work(args.layout)});
}

}  // namespace

void backend::act_forward(const ActArgs& args) {
  run(args);
}
void backend::act_backward(const ActArgs& args) {
  run(args);
}

}  // namespace fastvit
