// Exchanges between GPUs; see exchange_merge.cu, collective_message.cu and ipc.cu.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// Exchanges numbers that an op without `exchange` has computed; see fastvit/sync/transport.py.
Tensor cuda_exchange_merge(Tensor numbers, Tensor exchange);

// A rank's message to a collective, and the group's numbers from the messages that it returns: NaN, and a
// peer::FaultReport, unless all tags equal this rank's. `numbers` are this rank's.
Tensor pack_message(Tensor numbers, Tensor exchange);
Tensor merge_messages(Tensor messages, Tensor numbers, Tensor exchange);

// GPU memory that processes of one host share: `bytes` zeros on `device`, and the handle by which another
// process opens them. They are never freed, since a peer may still write to them.
std::tuple<Tensor, Tensor> ipc_allocate(int64_t bytes, int64_t device);
// The address of that memory of another process for the kernels of `device`. It is never unmapped, since a
// CUDA graph may still use it. No tensor: the memory is another GPU's, and torch refuses one of `device`.
int64_t ipc_open(Tensor handle, int64_t device);

}  // namespace fastvit
