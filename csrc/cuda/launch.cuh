// Launches kernels through cudaLaunchKernelEx, so that the same sources also run on a CPU model of CUDA,
// which does not have <<<>>>. Arguments are converted to the kernel's parameter types.
#pragma once

#include <cuda_runtime.h>

#include "threads.h"

namespace fastvit {

// Declares `name` as the launch's dynamic shared memory.
#ifndef FASTVIT_DYNAMIC_SHARED
#define FASTVIT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

struct Launch {
  int64_t blocks;
  cudaStream_t stream;
  size_t shared_bytes = 0;   // dynamic
  bool cooperative = false;  // all blocks resident at once, or cudaErrorCooperativeLaunchTooLarge
  bool early = false;        // from sm_90 on, while the previous kernel ends, for which this one waits itself
};

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  if (how.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attribute{};
  if (how.cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(how.blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = &attribute;
  config.numAttrs = how.cooperative || how.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fastvit
