// Defines all ops of both libraries, _C.so and _cuda.so, and registers the implementations for CPUs. The
// schemas of batch norm, LayerNorm and activations are in their headers; fastvit/ops.py documents these ops.
#include "build_info.h"
#include "cpu/kernel_table.h"
#include "register_ops.h"
#include "sync/cpu_exchange.h"

STABLE_TORCH_LIBRARY(fastvit, m) {
  fastvit::define_batch_norm(m);
  fastvit::define_layer_norm(m);
  fastvit::define_activations(m);

  // The instruction set of the CPU kernels, such as "avx512".
  m.def("cpu_capability() -> str");
  // The architectures that the CUDA kernels were built for, or why they were not built; and a checksum of the
  // sources.
  m.def("cuda_build() -> str");

  // Exchanges. In an exchange, every rank of a process group sends its `numbers` to all ranks, and all merge
  // the numbers of all ranks.
  //   numbers   The moments or the sums of all channels, as bn_stats and bn_reduce return them.
  //   exchange  A tensor of int64 on the CPU that describes the exchange: this rank, the number of ranks,
  //             their arenas if they have any, a time limit, the address of a report of faults, and a tag, by
  //             which ranks see that all are in the same exchange (struct ExchangeDescriptor).
  //   arena     The memory of a rank into which the other ranks write their messages.

  // The bytes of an arena for `world` ranks, each of whose numbers fit in `capacity` packets of 16 bytes.
  m.def("arena_bytes(int world, int capacity) -> int");
  // Sends this rank's numbers through the arenas and awaits those of all ranks. Returns the merged moments,
  // or this rank's sums and the total.
  m.def("exchange_merge(Tensor numbers, Tensor exchange) -> Tensor");
  // On a CPU, goes on waiting for an exchange. Every op that waits returns at the time limit even if
  // messages are missing, so that Python can handle signals; the report whose address is in `exchange` names
  // the missing ranks. `result` is what the op that began the exchange returned.
  m.def("exchange_wait(Tensor(a!) result, Tensor exchange) -> ()");
  // On a CPU, abandons the exchange, or the next one if all messages have arrived, and tells all other ranks,
  // whose exchange fails then.
  m.def("exchange_abandon(Tensor exchange) -> ()");
  // Allocates GPU memory for an arena: the memory, and a handle by which other processes can open it.
  m.def("ipc_allocate(int bytes, int device) -> (Tensor, Tensor)");
  // Opens another process's memory by its handle. Returns its address in this process.
  m.def("ipc_open(Tensor handle, int device) -> int");

  // The other way, for ranks without arenas: a collective of torch.distributed carries the messages.
  // On a CPU, merges this rank's numbers with the messages that it has received from the other ranks.
  m.def("merge_received(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
  // On a GPU, returns the message with this rank's numbers: moments for an all_gather, sums for an
  // all_reduce. A message of sums has a place for the tag of each rank, and zeros in the places of other
  // ranks, so the sum of the messages has the tags of all ranks.
  m.def("pack_message(Tensor numbers, Tensor exchange) -> Tensor");
  // On a GPU, merges what the collective has returned: the messages of all ranks, or their sum.
  m.def("merge_messages(Tensor messages, Tensor numbers, Tensor exchange) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CPU, m) {
  fastvit::implement_common_ops(m);
  m.impl("exchange_merge", TORCH_BOX(&fastvit::exchange_merge));
  m.impl("exchange_wait", TORCH_BOX(&fastvit::exchange_wait));
  m.impl("exchange_abandon", TORCH_BOX(&fastvit::exchange_abandon));
  m.impl("merge_received", TORCH_BOX(&fastvit::merge_received));
}

static std::string cpu_capability() {
  return fastvit::kernel_table().name;
}

static std::string cuda_build() {
  return fastvit::kBuildInfo;
}

STABLE_TORCH_LIBRARY_IMPL(fastvit, CompositeExplicitAutograd, m) {
  m.impl("cuda_build", TORCH_BOX(&cuda_build));
  m.impl("cpu_capability", TORCH_BOX(&cpu_capability));
  m.impl("arena_bytes", TORCH_BOX(&fastvit::peer::arena_bytes));
}
