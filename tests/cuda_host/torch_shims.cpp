// Stands in for libtorch_cuda and libc10_cuda: the model's device and stream, and memory of the exact size,
// filled with NaN and freed in the order of the stream.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

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

int cuda_host_allocations = 0;       // of torch's allocator that are in use
uint64_t cuda_host_requests = 0;     // of memory, of torch's allocator and for tensors
int cuda_host_failing_request = -1;  // the number of requests before one that fails; -1: none fails

static bool count_request() {
  ++cuda_host_requests;
  const bool fails = cuda_host_failing_request == 0;
  if (cuda_host_failing_request >= 0) --cuda_host_failing_request;
  return !fails;
}
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device, int32_t index,
                                        AtenTensorHandle* made) {
  static const auto of_torch =
      reinterpret_cast<decltype(&aoti_torch_empty_strided)>(dlsym(RTLD_NEXT, "aoti_torch_empty_strided"));
  if (!count_request()) return AOTI_TORCH_FAILURE;
  return of_torch(dims, sizes, strides, dtype, device, index, made);
}
AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** data) {
  if (!count_request() || posix_memalign(data, 512, bytes)) return AOTI_TORCH_FAILURE;
  ++cuda_host_allocations;
  std::memset(*data, 0xff, bytes);
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* data) {
  --cuda_host_allocations;
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
