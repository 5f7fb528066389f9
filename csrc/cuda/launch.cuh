// How kernels are launched: through cudaLaunchKernelEx, so that the same sources also run on a CPU model of
// CUDA, where <<<>>> has no meaning. Arguments are converted to the kernel's parameter types.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "threads.h"

namespace fastvit {

// Declares `name` as the launch's dynamic shared memory.
#ifndef FASTVIT_DYNAMIC_SHARED
#define FASTVIT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

constexpr int kDevices = 64;  // whose answers are remembered; others are asked each time

// Lets launches of a kernel on a device ask for as much dynamic shared memory as `bytes`.
template <auto kKernel>
cudaError_t allow_shared(int device, int bytes) {
  static std::atomic<int> allowed[kDevices];
  if (device < kDevices && allowed[device].load() >= bytes) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (device < kDevices && status == cudaSuccess) allowed[device].store(bytes);
  return status;
}

struct Launch {
  int64_t blocks;
  cudaStream_t stream;
  size_t shared_bytes = 0;   // dynamic; above 48 KiB see allow_shared
  bool cooperative = false;  // all blocks at once, or cudaErrorCooperativeLaunchTooLarge
};

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  if (how.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(how.blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = &cooperative;
  config.numAttrs = how.cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fastvit
