// ipc_allocate, ipc_open: GPU memory that processes of one host share by CUDA's interprocess communication
// (IPC). The ops have no kernel.
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../op_checker.h"
#include "exchange_ops.h"
#include "launch.cuh"

namespace fastvit {
namespace {

// Returns a tensor over `size` bytes at `data`, which torch's allocator does not own. `deleter` frees them at
// the tensor's end; without a deleter nobody does.
template <class... Deleter>
Tensor byte_tensor(void* data, int64_t size, torch::stable::Device device, Deleter... deleter) {
  const int64_t stride = 1;
  return torch::stable::from_blob(data, {&size, 1}, {&stride, 1}, device, ScalarType::Byte, deleter...);
}

}  // namespace

std::tuple<Tensor, Tensor> ipc_allocate(int64_t bytes, int64_t device_index) {
  using torch::headeronly::DeviceType;
  const LaunchContext context{int(device_index)};  // makes the device current until the op returns
  void* data = nullptr;
  // A handle opens a whole allocation. torch's allocator returns parts of larger allocations, and so does
  // cudaMalloc below 2 MiB (CUDA programming guide, interprocess communication).
  constexpr int64_t kMinWholeAllocation = 2 << 20;
  STD_CUDA_CHECK(cudaMalloc(&data, size_t(ceil_div(bytes, kMinWholeAllocation) * kMinWholeAllocation)));
  STD_CUDA_CHECK(cudaMemset(data, 0, size_t(bytes)));
  STD_CUDA_CHECK(cudaDeviceSynchronize());  // a peer writes only after the zeros
  auto* const ipc_handle = new cudaIpcMemHandle_t;
  Tensor handle = byte_tensor(ipc_handle, sizeof(*ipc_handle), torch::stable::Device(DeviceType::CPU),
                              [](void* memory) { delete static_cast<cudaIpcMemHandle_t*>(memory); });
  STD_CUDA_CHECK(cudaIpcGetMemHandle(ipc_handle, data));
  const torch::stable::Device gpu{DeviceType::CUDA, torch::stable::accelerator::DeviceIndex(device_index)};
  return {byte_tensor(data, bytes, gpu), handle};
}

int64_t ipc_open(Tensor handle, int64_t device_index) {
  const LaunchContext context{int(device_index)};  // makes the device current until the op returns
  cudaIpcMemHandle_t ipc_handle;
  require(handle.is_cpu() && handle.is_contiguous() && handle.scalar_type() == ScalarType::Byte &&
              handle.numel() == int64_t(sizeof(ipc_handle)),
          "ipc_open", "handle", "is not ", sizeof(ipc_handle), " bytes on the CPU, from ipc_allocate");
  check_storage_size("ipc_open", "handle", handle);
  std::memcpy(&ipc_handle, handle.data_ptr(), sizeof(ipc_handle));
  void* data = nullptr;
  STD_CUDA_CHECK(cudaIpcOpenMemHandle(&data, ipc_handle, cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(data);
}

}  // namespace fastvit
