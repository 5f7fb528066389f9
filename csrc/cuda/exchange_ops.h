// The ops by which the ranks (processes) of a group exchange statistics between GPUs. exchange_merge.cu,
// collective_message.cu and ipc.cu define them. `numbers` are this rank's moments, `[2C + 2]` (mean[C], M2[C]
// and the count, stored as two numbers), or the sums of a backward, `[1, 2C]`: the first sums of all C
// channels, then the second sums. The tensor `exchange` is an ExchangeDescriptor
// (sync/exchange_descriptor.h): it describes the group and the exchange.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// The op exchange_merge on GPUs: merges this rank's numbers, which were computed without an exchange, with
// those of the other ranks. Returns the merged moments, or two rows of sums: this rank's, then the total.
Tensor cuda_exchange_merge(Tensor numbers, Tensor exchange);

// Returns this rank's message to torch.distributed's all_gather (moments) or all_reduce (sums): the numbers,
// and a tag, by which ranks see that they are in the same exchange. all_reduce keeps the tags of all ranks.
Tensor pack_message(Tensor numbers, Tensor exchange);
// Merges the messages that all_gather has returned, or takes the total from the one of all_reduce. The result
// has the rows of exchange_merge's; for sums, `numbers` are the first. If the tag of a rank differs from this
// rank's, the merged numbers are NaN, and the FaultReport has the first such rank.
Tensor merge_messages(Tensor messages, Tensor numbers, Tensor exchange);

// Allocates `bytes` bytes of zeros on a GPU. Returns the memory, and the handle by which another process
// opens it. The memory is never freed, because a peer (another rank) may still write to it.
std::tuple<Tensor, Tensor> ipc_allocate(int64_t bytes, int64_t device_index);
// Returns the address of another process's memory for the kernels of a GPU. The memory is never unmapped,
// because a CUDA graph may still use it. The result is not a tensor: the memory may be another GPU's, and
// torch refuses to wrap another GPU's memory as a tensor of this device.
int64_t ipc_open(Tensor handle, int64_t device_index);

}  // namespace fastvit
