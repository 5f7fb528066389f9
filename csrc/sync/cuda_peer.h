// Exchanges between GPUs; see cuda_peer.cu and cuda_ipc.cu.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// The exchange of numbers that were formed before: see fastvit/sync/transport.py.
Tensor cuda_peer_share(Tensor numbers, Tensor exchange);

// GPU memory that processes of one host share. Without a handle: allocates `bytes` zeros on `device`, and
// returns them and the handle by which another process opens them. They are never freed, since a peer may
// still write to them. With a handle: maps that memory on `device` for the lifetime of the tensor.
std::tuple<Tensor, Tensor> ipc_memory(int64_t bytes, int64_t device, std::optional<Tensor> handle);

}  // namespace fastvit
