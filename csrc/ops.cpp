// The ops' schemas, and their CPU implementations. fastvit/ops.py documents the ops.
//
// abn_forward_ returns `saved` and not x: autograd learns of the write by mark_dirty(x). torch.compile traces
// abn_forward, which returns a new tensor. Sums and moments are packed, so that ranks
// exchange each with one collective.
#include "cpu/kernels.h"
#include "register.h"
#include "sync/cpu_peer.h"

STABLE_TORCH_LIBRARY(fastvit, m) {
  m.def("bn_stats(Tensor x, int channel_dim, Tensor? exchange=None) -> Tensor");
  m.def(
      "bn_forward(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, Tensor? z, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim, "
      "bool training=True) -> (Tensor, Tensor)");
  m.def(
      "bn_apply(Tensor x, Tensor saved, Tensor? weight, Tensor? bias, Tensor? z, "
      "str activation, float activation_param, int channel_dim) -> Tensor");
  m.def(
      "abn_forward_(Tensor(a!) x, Tensor? moments, Tensor? weight, Tensor? bias, "
      "Tensor(b!)? running_mean, Tensor(c!)? running_var, Tensor(d!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim, "
      "bool training=True) -> Tensor");
  m.def(
      "abn_forward(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim, "
      "bool training=True) -> (Tensor, Tensor)");
  m.def("cpu_capability() -> str");
  m.def("cuda_build() -> str");
  m.def(
      "bn_reduce(Tensor x, Tensor dy, Tensor? z, Tensor saved, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim, Tensor? exchange=None) -> Tensor");
  m.def(
      "abn_reduce(Tensor y, Tensor dy, Tensor saved, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim, Tensor? exchange=None) -> Tensor");
  m.def(
      "bn_backward(Tensor x, Tensor dy, Tensor? z, Tensor saved, Tensor? sums, Tensor? weight, "
      "Tensor? bias, str activation, float activation_param, int channel_dim, bool training=True) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "abn_backward(Tensor y, Tensor dy, Tensor saved, Tensor? sums, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim, bool training=True) -> (Tensor, Tensor)");
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType? output_dtype=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor x, Tensor dy, Tensor saved, Tensor? weight, bool parameters) "
      "-> (Tensor, Tensor)");
  m.def("act_forward(Tensor x, str activation, float activation_param) -> Tensor");
  m.def("act_backward(Tensor x, Tensor dy, str activation, float activation_param) -> Tensor");
  m.def("glu_forward(Tensor a, Tensor b, str activation, float activation_param) -> Tensor");
  m.def(
      "glu_backward(Tensor a, Tensor b, Tensor dy, str activation, float activation_param) "
      "-> (Tensor, Tensor)");
  // Exchanges between ranks: see fastvit/sync.
  m.def("peer_bytes(int world, int capacity) -> int");
  m.def("peer_share(Tensor numbers, Tensor exchange) -> Tensor");
  m.def("peer_wait(Tensor(a!) result, Tensor exchange) -> ()");
  m.def("peer_give_up(Tensor exchange) -> ()");
  m.def("ipc_memory(int bytes, int device) -> (Tensor, Tensor)");
  m.def("ipc_open(Tensor handle, int device) -> int");
  m.def("direct_merge(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
  m.def("message_pack(Tensor numbers, Tensor exchange) -> Tensor");
  m.def("message_merge(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CPU, m) {
  fastvit::implement_ops(m);
  m.impl("peer_share", TORCH_BOX(&fastvit::peer_share));
  m.impl("peer_wait", TORCH_BOX(&fastvit::peer_wait));
  m.impl("peer_give_up", TORCH_BOX(&fastvit::peer_give_up));
  m.impl("direct_merge", TORCH_BOX(&fastvit::direct_merge));
}

static std::string cpu_capability() {
  return fastvit::kernels().name;
}
// Whole in the library's bytes, where tools/gpu_steps.py finds it without loading the library.
[[gnu::used]] static const char build[] = FASTVIT_CUDA_BUILD;
static std::string cuda_build() {
  return build;
}
STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("cuda_build", TORCH_BOX(&cuda_build));
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("peer_bytes", TORCH_BOX(&fastvit::peer::arena_bytes));
}
