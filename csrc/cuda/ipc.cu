#include "ipc.h"

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "host.h"

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

std::tuple<Tensor, Tensor> ipc_memory(int64_t bytes, int64_t index) {
  const Device device{int(index)};
  void* data = nullptr;
  // Not torch's allocator: it hands out parts of larger pieces, and a handle opens the whole piece.
  STD_CUDA_CHECK(cudaMalloc(&data, size_t(bytes)));
  STD_CUDA_CHECK(cudaMemset(data, 0, size_t(bytes)));
  STD_CUDA_CHECK(cudaDeviceSynchronize());
  cudaIpcMemHandle_t handle;
  STD_CUDA_CHECK(cudaIpcGetMemHandle(&handle, data));
  void* copy = new char[sizeof(handle)];
  std::memcpy(copy, &handle, sizeof(handle));
  const int64_t size[] = {sizeof(handle)}, stride[] = {1};
  Tensor name = torch::stable::from_blob(copy, {size, 1}, {stride, 1},
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                         ScalarType::Byte, [](void* p) { delete[] static_cast<char*>(p); });
  return {bytes_at(data, bytes, gpu(index)), name};
}

Tensor ipc_open(Tensor name, int64_t bytes, int64_t index) {
  cudaIpcMemHandle_t handle;
  require(name.is_cpu() && name.is_contiguous() && name.scalar_type() == ScalarType::Byte &&
              name.numel() == int64_t(sizeof(handle)),
          "ipc_open", "handle", "is not ", sizeof(handle), " bytes on the CPU, from ipc_memory");
  check_memory("ipc_open", "handle", name);
  std::memcpy(&handle, name.data_ptr(), sizeof(handle));
  const Device device{int(index)};
  void* data = nullptr;
  STD_CUDA_CHECK(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess));
  const int64_t size[] = {bytes}, stride[] = {1};
  return torch::stable::from_blob(data, {size, 1}, {stride, 1}, gpu(index), ScalarType::Byte,
                                  [mapped = device.current](void* p) {
                                    int before = mapped;
                                    (void)cudaGetDevice(&before);
                                    (void)cudaSetDevice(mapped);
                                    (void)cudaDeviceSynchronize();  // kernels under way may still write there
                                    (void)cudaIpcCloseMemHandle(p);
                                    (void)cudaSetDevice(before);
                                  });
}

}  // namespace fastvit
