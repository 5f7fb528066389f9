// The ops' schemas, and their CPU implementations. What each op does stands in fastvit/ops.py.
//
// abn_forward_ returns no alias of x: that, with mark_dirty(x) alone, is what autograd and torch.compile
// can both follow in eager mode; abn_forward is the same with a result of its own. Sums and moments are
// packed so that ranks exchange each with one collective.
#include "cpu/backend.h"
#include "cpu/message.h"
#include "cpu/peer_ops.h"
#include "frontend.h"
#include "message_ops.h"

STABLE_TORCH_LIBRARY(fastvit, m) {
  m.def("bn_stats(Tensor x, int channel_dim, Tensor? exchange=None) -> Tensor");
  m.def(
      "bn_forward(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, Tensor? z, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim, Tensor? "
      "exchange=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "bn_apply(Tensor x, Tensor saved, Tensor? weight, Tensor? bias, Tensor? z, "
      "str activation, float activation_param, int channel_dim) -> Tensor");
  m.def(
      "abn_forward_(Tensor(a!) x, Tensor? moments, Tensor? weight, Tensor? bias, "
      "Tensor(b!)? running_mean, Tensor(c!)? running_var, Tensor(d!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim, Tensor? "
      "exchange=None) -> Tensor");
  m.def(
      "abn_forward(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
      "float? momentum, float eps, str activation, float activation_param, int channel_dim) "
      "-> (Tensor, Tensor)");
  m.def(
      "bn_local_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? z, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
      "str activation, float activation_param, int channel_dim) -> (Tensor, Tensor)");
  m.def(
      "abn_local_forward_(Tensor(a!) x, Tensor? weight, Tensor? bias, Tensor(b!)? running_mean, "
      "Tensor(c!)? running_var, Tensor(d!)? num_batches_tracked, float? momentum, float eps, "
      "str activation, float activation_param, int channel_dim) -> Tensor");
  m.def(
      "bn_local_backward(Tensor x, Tensor dy, Tensor? z, Tensor saved, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim) -> (Tensor, Tensor, Tensor)");
  m.def(
      "abn_local_backward(Tensor y, Tensor dy, Tensor saved, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim) -> (Tensor, Tensor)");
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
      "Tensor? bias, str activation, float activation_param, int channel_dim, Tensor? exchange=None) -> "
      "(Tensor, Tensor)");
  m.def(
      "abn_backward(Tensor y, Tensor dy, Tensor saved, Tensor? sums, Tensor? weight, Tensor? bias, "
      "str activation, float activation_param, int channel_dim, Tensor? exchange=None) -> Tensor");
  m.def(
      "message_pack(Tensor numbers, int layer, int step, int tag, int tags, int capacity, bool wide) -> "
      "Tensor");
  m.def(
      "message_unpack(Tensor messages, Tensor numbers, int layer, int step, int rank, int ranks, "
      "bool gathered, Tensor(a!) report) -> Tensor");
  m.def("peer_segment_bytes(int world, int capacity) -> int");
  m.def(
      "peer_push(Tensor(a!) segment, Tensor(b!) state, Tensor numbers, int layer, int step, int kind) -> ()");
  m.def(
      "peer_poll(Tensor segment, Tensor(a!) state, Tensor numbers, Tensor(b!) rows, Tensor(c!)? total, "
      "int layer, int step, int kind, float seconds) -> int");
  m.def(
      "peer_exchange(Tensor(a!) segment, Tensor(b!) state, Tensor numbers, Tensor(c!) rows, "
      "Tensor(d!)? total, int layer, int step, int kind, float seconds) -> int");
  m.def("peer_give_up(Tensor(a!) segment, Tensor(b!) state) -> ()");
  m.def("exchange_arena_bytes(int world, int capacity) -> int");
  m.def("exchange_push(Tensor exchange, Tensor numbers, int kind) -> ()");
  m.def("exchange_poll(Tensor exchange, Tensor numbers, int kind, bool add) -> Tensor");
  m.def("exchange_give_up(Tensor exchange, Tensor(a!) arena) -> ()");
  m.def("exchange_rejoin(Tensor(a!) arena, int epoch, int generation) -> ()");
  m.def("ipc_memory(int bytes, int device) -> (Tensor, Tensor)");
  m.def("ipc_open(Tensor handle, int bytes, int device) -> Tensor");
  m.def("peer_rejoin(Tensor(a!) segment, Tensor(b!) state, float seconds) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CPU, m) {
  fastvit::Frontend<fastvit::Cpu>::implement(m);
  fastvit::implement_messages<fastvit::CpuMessages>(m);
  m.impl("peer_push", TORCH_BOX(&fastvit::peer_push));
  m.impl("peer_poll", TORCH_BOX(&fastvit::peer_poll));
  m.impl("peer_exchange", TORCH_BOX(&fastvit::peer_exchange));
  m.impl("peer_give_up", TORCH_BOX(&fastvit::peer_give_up));
  m.impl("peer_rejoin", TORCH_BOX(&fastvit::peer_rejoin));
}

static std::string cpu_capability() {
  return fastvit::cpu_capability();
}
static std::string cuda_build() {
  return FASTVIT_CUDA_BUILD;
}
STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("cuda_build", TORCH_BOX(&cuda_build));
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("peer_segment_bytes", TORCH_BOX(&fastvit::peer_segment_bytes));
  m.impl("exchange_arena_bytes", TORCH_BOX(&fastvit::peer::arena_bytes));
}
