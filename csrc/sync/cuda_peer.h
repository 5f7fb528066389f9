// Exchanges between GPUs; see cuda_peer.cu and cuda_ipc.cu.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// The exchange of numbers that no other op has at hand: see fastvit/sync/transport.py.
Tensor cuda_peer_share(Tensor numbers, Tensor exchange);

// Memory of a GPU that processes of one host share. Without a handle `bytes` zeros on `device`, and the
// handle by which another process opens them; they are given back when the process ends: until then a peer
// may still write to them. With one that other process's memory, as `device` sees it, for as long as the
// tensor lives.
std::tuple<Tensor, Tensor> ipc_memory(int64_t bytes, int64_t device, std::optional<Tensor> handle);

}  // namespace fastvit
