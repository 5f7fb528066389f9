// The host's side of a launch: the op's device and stream, the choice of a kernel's template, the launch.
//
// Kernels are launched through cudaLaunchKernelEx, so that the same sources also run on a CPU model of CUDA,
// which does not have <<<>>>.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "../dtypes.h"
#include "../walk_layout.h"
#include "plan.h"
#include "vector_io.cuh"

namespace fastvit {

// The value that query(int& value) gives for `subject` on `device`, queried once per thread and type of
// query; it returns a cudaError_t. Every kernel is queried before its first launch, so a GPU without code for
// it is refused here.
template <class Query>
int cached_query(const void* subject, int device_index, const Query& query) {
  thread_local std::map<std::pair<const void*, int>, int> values;
  const auto known = values.find({subject, device_index});
  if (known != values.end()) return known->second;
  int value = 0;
  const cudaError_t status = query(value);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();
    throw std::runtime_error(
        "the CUDA kernels have no code for this GPU; build fastvit with TORCH_CUDA_ARCH_LIST of its compute "
        "capability (`python -m fastvit.info` names both)");
  }
  STD_CUDA_CHECK(status);
  return values[{subject, device_index}] = value;
}

// Shared memory of a block without vectors: the most that merging and per-channel tables take in a kernel
// (rows of 16-bit elements), and the system's 1 KiB.
constexpr int kReservedSharedBytes = 32 << 10;

// With at least this much shared memory per multiprocessor (A100, H100, B200) two blocks each hold more than
// a batch of every operand. GeForce cards and the T4 have at most 100 KiB, and hold one block.
constexpr int kMinSharedForTwoBlocks = 128 << 10;

// Makes the input's device current, and has its current stream and its properties.
class LaunchContext {
 public:
  explicit LaunchContext(int index) : guard(index) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &s));
    stream = static_cast<cudaStream_t>(s);
    STD_CUDA_CHECK(cudaGetDevice(&device_index));
    limits.multiprocessors = attribute<cudaDevAttrMultiProcessorCount>();
    const int shared = attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    limits.single_launch_blocks = shared < kMinSharedForTwoBlocks ? 1 : kBlocksPerMultiprocessor;
    // The blocks of an on-chip op wait for each other.
    limits.smem_cache_bytes = attribute<cudaDevAttrCooperativeLaunch>()
                                  ? std::max(0, shared / limits.single_launch_blocks - kReservedSharedBytes)
                                  : 0;
  }

 private:
  template <cudaDeviceAttr kAttribute>
  int attribute() const {
    return cached_query(nullptr, device_index,
                        [&](int& value) { return cudaDeviceGetAttribute(&value, kAttribute, device_index); });
  }
  torch::stable::accelerator::DeviceGuard guard;

 public:
  cudaStream_t stream;
  int device_index;
  DeviceLimits limits;
};

// f.template operator()<kIsRows, V>() for a plan.
template <class T, class F>
void dispatch_kernel_of_plan(const LaunchPlan& plan, const F& f) {
  if (plan.is_rows)
    plan.is_vectorized ? f.template operator()<true, kVectorWidth<T>>() : f.template operator()<true, 1>();
  else
    plan.is_vectorized ? f.template operator()<false, kVectorWidth<T>>() : f.template operator()<false, 1>();
}

// One more block per multiprocessor, for launch bounds: with it the forwards are faster on sm_90, and the
// compiler for other architectures would spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kOneMoreBlockOnSm90 = 1;
#else
constexpr int kOneMoreBlockOnSm90 = 0;
#endif

// Blocks of a kernel that fit on a multiprocessor, without dynamic shared memory.
inline int resident_blocks_of(const LaunchContext& context, const void* kernel) {
  return cached_query(kernel, context.device_index, [&](int& value) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, kThreads, 0);
  });
}

// For LaunchPlanner::plan: the blocks per multiprocessor of kernel_of<kIsRows, V>(), the kernel of a plan. No other
// kernel is queried: a query loads a kernel, and loading may wait for the GPU, and so for peers.
template <class T, class KernelOf>
auto resident_blocks(const LaunchContext& context, const KernelOf& kernel_of) {
  return [&](const LaunchPlan& plan) {
    int blocks = 0;
    dispatch_kernel_of_plan<T>(plan, [&]<bool kIsRows, int V>() {
      blocks = resident_blocks_of(context,
                                  reinterpret_cast<const void*>(kernel_of.template operator()<kIsRows, V>()));
    });
    return blocks;
  };
}

// Declares `name` as the launch's dynamic shared memory.
#ifndef FASTVIT_DYNAMIC_SHARED
#define FASTVIT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// The one parameter of every kernel. From sm_90 on blocks begin while the stream's previous kernel ends, so
// only begin() gives the parameters, and nothing that they point to may be accessed before it.
template <class Params>
class KernelParams {
  Params params;

 public:
  explicit KernelParams(const Params& params) : params(params) {}

  // All threads call it first. It waits until the previous kernel, and so every kernel before it, has ended.
  // Then the next kernel's blocks may occupy the multiprocessors that this grid leaves, and wait there. A
  // grid that waits for other ranks does not allow that: two waiting grids would leave no room for NCCL's
  // blocks.
  __device__ __forceinline__ const Params& get_after_previous_kernel() const {
    wait_for_previous_kernel();
    if constexpr (!requires { params.group_exchange; }) let_next_kernel_begin();
    return params;
  }
};

struct LaunchConfig {
  int64_t blocks;
  const LaunchContext& context;
  size_t shared_bytes = 0;   // dynamic
  bool cooperative = false;  // all blocks resident at once, or cudaErrorCooperativeLaunchTooLarge
};

template <class Params>
cudaError_t launch(void (*kernel)(KernelParams<Params>), const LaunchConfig& config, const Params& params) {
  if (config.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Not the device's capability: the driver may have compiled PTX of an older architecture, which does not
  // wait.
  const int version =
      cached_query(reinterpret_cast<const void*>(kernel), config.context.device_index, [&](int& value) {
        cudaFuncAttributes attributes{};
        const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
        value = attributes.ptxVersion;
        return status;
      });
  cudaLaunchAttribute attribute{};
  if (config.cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t cuda_config{};
  cuda_config.gridDim = dim3(unsigned(config.blocks));
  cuda_config.blockDim = dim3(kThreads);
  cuda_config.dynamicSmemBytes = config.shared_bytes;
  cuda_config.stream = config.context.stream;
  cuda_config.attrs = &attribute;
  cuda_config.numAttrs = config.cooperative || version >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&cuda_config, kernel, KernelParams<Params>(params));
}

// Launches kernel_of<kIsRows, V>(), the kernel of a plan.
template <class T, class KernelOf, class Params>
void launch_planned(const LaunchPlan& plan, const KernelOf& kernel_of, const LaunchConfig& config,
                    const Params& params) {
  dispatch_kernel_of_plan<T>(plan, [&]<bool kIsRows, int V>() {
    STD_CUDA_CHECK(launch(kernel_of.template operator()<kIsRows, V>(), config, params));
  });
}

}  // namespace fastvit
