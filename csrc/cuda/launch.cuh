// How kernels are launched: through cudaLaunchKernelEx, so that the same sources also run on a CPU model of
// CUDA, where <<<>>> has no meaning. Arguments are converted to the kernel's parameter types.
#pragma once

#include <cuda_runtime.h>

namespace fastvit {

constexpr int kThreads = 256;  // per block, in every kernel
constexpr int kResident = 2;   // blocks that a multiprocessor holds at least; leaves a thread 128 registers

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fastvit
