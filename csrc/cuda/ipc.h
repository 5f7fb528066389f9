// Memory of one GPU that processes of one host share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastvit {

using torch::stable::Tensor;

// `bytes` zeros on `device`, and the handle by which another process opens them. They are given back when the
// process ends: until then a peer may still write to them.
std::tuple<Tensor, Tensor> ipc_memory(int64_t bytes, int64_t device);

// Another process's memory, as `device` sees it, for as long as the tensor lives.
Tensor ipc_open(Tensor handle, int64_t bytes, int64_t device);

}  // namespace fastvit
