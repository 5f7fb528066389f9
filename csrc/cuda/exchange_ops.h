// The ops by which GPUs exchange statistics: exchange_merge.cu, collective_message.cu and ipc.cu define
// them. `numbers` are this rank's moments, `[2C + 2]`, or its two sums of each channel, `[1, 2C]`. The
// tensor `exchange` is an ExchangeDescriptor (sync/exchange_descriptor.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// Merges numbers that an op without `exchange` has computed with those of all ranks. Returns moments, or
// two rows of sums: this rank's and those of all ranks.
Tensor cuda_exchange_merge(Tensor numbers, Tensor exchange);

// Returns this rank's message to a collective of torch.distributed.
Tensor pack_message(Tensor numbers, Tensor exchange);
// Merges the messages that the collective returns; the result is that of exchange_merge. If the tag of a
// message differs from this rank's, the result is NaN, and the FaultReport has the first such rank.
Tensor merge_messages(Tensor messages, Tensor numbers, Tensor exchange);

// Allocates `bytes` zeros on a GPU. Returns them, and the handle by which another process opens them. The
// memory is never freed, because a peer may still write to it.
std::tuple<Tensor, Tensor> ipc_allocate(int64_t bytes, int64_t device_index);
// Returns the address of another process's memory for the kernels of a GPU. The memory is never unmapped,
// because a CUDA graph may still use it. The result is no tensor, because the memory may be another GPU's,
// and torch refuses to make a tensor of this device of it.
int64_t ipc_open(Tensor handle, int64_t device_index);

}  // namespace fastvit
