// What libtorch_cuda and libc10_cuda would answer, for tensors that lie on the CPU: the emulated device, its
// stream, and memory whose release waits for the stream, poisoned and of the exact size.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <cstring>

#include "cuda_runtime.h"

extern "C" {

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = reinterpret_cast<void*>(cuda_host::config().stream);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;  // tensors have no device index here; cudaSetDevice chooses the emulated device
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** data) {
  if (posix_memalign(data, 512, bytes)) return AOTI_TORCH_FAILURE;
  std::memset(*data, 0xff, bytes);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* data) {
  cuda_host::enqueue(reinterpret_cast<cudaStream_t>(cuda_host::config().stream), [data] { std::free(data); });
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_c10_cuda_check_msg(int32_t error, const char* file, const char*, uint32_t line, bool,
                                        char** message) {
  *message = nullptr;
  if (error == cudaSuccess) return AOTI_TORCH_SUCCESS;
  *message = static_cast<char*>(std::malloc(256));
  std::snprintf(*message, 256, "CUDA error: %s (%d) at %s:%u", cudaGetErrorString(cudaError_t(error)), error,
                file, line);
  return AOTI_TORCH_SUCCESS;
}
void torch_c10_cuda_free_error_msg(char* message) {
  std::free(message);
}
}
