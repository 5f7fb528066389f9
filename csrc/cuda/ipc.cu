#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../op_checker.h"
#include "exchange_ops.h"
#include "launch.cuh"

namespace fastvit {

std::tuple<Tensor, Tensor> ipc_allocate(int64_t bytes, int64_t index) {
  const LaunchContext context{int(index)};
  void* data = nullptr;
  // Not torch's allocator: it returns parts of larger allocations, and a handle opens the whole allocation.
  // Nor less than 2 MiB, of which cudaMalloc too returns parts (programming guide, interprocess
  // communication).
  constexpr int64_t kWhole = 2 << 20;
  STD_CUDA_CHECK(cudaMalloc(&data, size_t(ceil_div(bytes, kWhole) * kWhole)));
  STD_CUDA_CHECK(cudaMemset(data, 0, size_t(bytes)));
  STD_CUDA_CHECK(cudaDeviceSynchronize());
  auto* const opaque = new cudaIpcMemHandle_t;
  using torch::headeronly::DeviceType;
  const auto tensor = [](void* at, int64_t size, torch::stable::Device where, auto... deleter) {
    const int64_t stride = 1;
    return torch::stable::from_blob(at, {&size, 1}, {&stride, 1}, where, ScalarType::Byte, deleter...);
  };
  Tensor handle = tensor(opaque, sizeof(*opaque), torch::stable::Device(DeviceType::CPU),
                         [](void* p) { delete static_cast<cudaIpcMemHandle_t*>(p); });
  STD_CUDA_CHECK(cudaIpcGetMemHandle(opaque, data));
  const torch::stable::Device gpu{DeviceType::CUDA, torch::stable::accelerator::DeviceIndex(index)};
  return {tensor(data, bytes, gpu), handle};
}

int64_t ipc_open(Tensor handle, int64_t index) {
  const LaunchContext context{int(index)};
  cudaIpcMemHandle_t opaque;
  require(handle.is_cpu() && handle.is_contiguous() && handle.scalar_type() == ScalarType::Byte &&
              handle.numel() == int64_t(sizeof(opaque)),
          "ipc_open", "handle", "is not ", sizeof(opaque), " bytes on the CPU, from ipc_allocate");
  check_storage("ipc_open", "handle", handle);
  std::memcpy(&opaque, handle.data_ptr(), sizeof(opaque));
  void* data = nullptr;
  STD_CUDA_CHECK(cudaIpcOpenMemHandle(&data, opaque, cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(data);
}

}  // namespace fastvit
