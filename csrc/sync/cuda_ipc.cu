#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../checks.h"
#include "../cuda/launch.cuh"
#include "cuda_peer.h"

namespace fastvit {
namespace {

Tensor bytes_at(void* data, int64_t bytes, torch::stable::Device device) {
  const int64_t size[] = {bytes}, stride[] = {1};
  return torch::stable::from_blob(data, {size, 1}, {stride, 1}, device, ScalarType::Byte);
}

torch::stable::Device gpu(int64_t index) {
  return {torch::headeronly::DeviceType::CUDA, torch::stable::accelerator::DeviceIndex(index)};
}

}  // namespace

std::tuple<Tensor, Tensor> ipc_memory(int64_t bytes, int64_t index, std::optional<Tensor> name) {
  const Device device{int(index)};
  cudaIpcMemHandle_t handle;
  void* data = nullptr;
  if (!name) {
    // Not torch's allocator: it returns parts of larger allocations, and a handle opens the whole allocation.
    STD_CUDA_CHECK(cudaMalloc(&data, size_t(bytes)));
    STD_CUDA_CHECK(cudaMemset(data, 0, size_t(bytes)));
    STD_CUDA_CHECK(cudaDeviceSynchronize());
    STD_CUDA_CHECK(cudaIpcGetMemHandle(&handle, data));
    void* copy = new char[sizeof(handle)];
    std::memcpy(copy, &handle, sizeof(handle));
    const int64_t size[] = {sizeof(handle)}, stride[] = {1};
    Tensor made = torch::stable::from_blob(copy, {size, 1}, {stride, 1},
                                           torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                           ScalarType::Byte, [](void* p) { delete[] static_cast<char*>(p); });
    return {bytes_at(data, bytes, gpu(index)), made};
  }
  require(name->is_cpu() && name->is_contiguous() && name->scalar_type() == ScalarType::Byte &&
              name->numel() == int64_t(sizeof(handle)),
          "ipc_memory", "handle", "is not ", sizeof(handle), " bytes on the CPU, from ipc_memory");
  check_memory("ipc_memory", "handle", *name);
  std::memcpy(&handle, name->data_ptr(), sizeof(handle));
  STD_CUDA_CHECK(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess));
  const int64_t size[] = {bytes}, stride[] = {1};
  Tensor opened = torch::stable::from_blob(data, {size, 1}, {stride, 1}, gpu(index), ScalarType::Byte,
                                           [mapped = device.current](void* p) {
                                             int before = mapped;
                                             (void)cudaGetDevice(&before);
                                             (void)cudaSetDevice(mapped);
                                             // running kernels may still write to it
                                             (void)cudaDeviceSynchronize();
                                             (void)cudaIpcCloseMemHandle(p);
                                             (void)cudaSetDevice(before);
                                           });
  return {opened, torch::stable::new_empty(*name, {0})};
}

}  // namespace fastvit
