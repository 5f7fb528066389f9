// Defines the ops, and registers their CPU implementations. Each family's header has its schemas;
// fastvit/ops.py documents the ops.
#include "cpu/kernel_table.h"
#include "register_ops.h"
#include "sync/cpu_exchange.h"

STABLE_TORCH_LIBRARY(fastvit, m) {
  fastvit::define_batch_norm(m);
  fastvit::define_layer_norm(m);
  fastvit::define_activations(m);
  m.def("cpu_capability() -> str");
  m.def("cuda_build() -> str");
  // Exchanges between ranks: see fastvit/sync.
  m.def("arena_bytes(int world, int capacity) -> int");
  m.def("exchange_merge(Tensor numbers, Tensor exchange) -> Tensor");
  m.def("exchange_wait(Tensor(a!) result, Tensor exchange) -> ()");
  m.def("exchange_abandon(Tensor exchange) -> ()");
  m.def("ipc_allocate(int bytes, int device) -> (Tensor, Tensor)");
  m.def("ipc_open(Tensor handle, int device) -> int");
  m.def("merge_received(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
  m.def("pack_message(Tensor numbers, Tensor exchange) -> Tensor");
  m.def("merge_messages(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CPU, m) {
  fastvit::implement_ops(m);
  m.impl("exchange_merge", TORCH_BOX(&fastvit::exchange_merge));
  m.impl("exchange_wait", TORCH_BOX(&fastvit::exchange_wait));
  m.impl("exchange_abandon", TORCH_BOX(&fastvit::exchange_abandon));
  m.impl("merge_received", TORCH_BOX(&fastvit::merge_received));
}

static std::string cpu_capability() {
  return fastvit::kernel_table().name;
}
// Whole in the library's bytes, where tools/gpu_steps.py finds it without loading the library.
[[gnu::used]] static const char build[] = FASTVIT_CUDA_BUILD;
static std::string cuda_build() {
  return build;
}
STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("cuda_build", TORCH_BOX(&cuda_build));
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("arena_bytes", TORCH_BOX(&fastvit::peer::arena_bytes));
}
