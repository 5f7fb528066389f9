// The host's part of a launch: LaunchContext is the op's device and stream, dispatch_kernel_of_plan chooses a
// kernel's template parameters, launch_planned launches the kernel. KernelParams passes a kernel's
// parameters.
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

// Asks CUDA for an integer property of a kernel or a device, and remembers the answer for the host thread.
// query(value) calls CUDA, sets value, and returns CUDA's status. `kernel` is null for a property of the
// device. Query must be a lambda: each has a type of its own, and so answers of its own. Every kernel is
// asked about before its first launch, so a GPU without code for it is refused here, with a message.
template <class Query>
int cached_query(const void* kernel, int device_index, const Query& query) {
  thread_local std::map<std::pair<const void*, int>, int> answers;
  const auto known_answer = answers.find({kernel, device_index});
  if (known_answer != answers.end()) return known_answer->second;
  int value = 0;
  const cudaError_t status = query(value);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();  // clears the error
    throw std::runtime_error(
        "the CUDA kernels have no code for this GPU; build fastvit with TORCH_CUDA_ARCH_LIST of its compute "
        "capability (`python -m fastvit.info` names both)");
  }
  STD_CUDA_CHECK(status);
  return answers[{kernel, device_index}] = value;
}

// A single launch is one kernel for both the statistics and the op; it keeps its vectors of the tensors in
// shared memory. This many bytes of a block's shared memory are left for other data: for merging, for tables
// with an entry per channel, and for the 1 KiB that CUDA reserves. A walk of 16-bit rows needs the most.
constexpr int kReservedSharedBytes = 32 << 10;

// With at least this much shared memory per multiprocessor (A100, H100, B200), each of two blocks of a single
// launch has room for more than one batch (kMaxBatchVectors vectors of each thread) of one operand. GeForce
// cards and the T4 have at most 100 KiB, which one block gets.
constexpr int kMinSharedForTwoBlocks = 128 << 10;

// Makes the op's device current while the object lives, and has its current stream and its limits.
class LaunchContext {
 public:
  explicit LaunchContext(int index) : guard(index) {
    void* current_stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &current_stream));
    stream = static_cast<cudaStream_t>(current_stream);
    STD_CUDA_CHECK(cudaGetDevice(&device_index));
    limits.multiprocessors = attribute<cudaDevAttrMultiProcessorCount>();
    const int shared_bytes = attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    limits.single_launch_blocks = shared_bytes < kMinSharedForTwoBlocks ? 1 : kBlocksPerMultiprocessor;
    // Blocks can wait for each other only in a cooperative launch. A device without it has no single launch.
    limits.smem_cache_bytes =
        attribute<cudaDevAttrCooperativeLaunch>()
            ? std::max(0, shared_bytes / limits.single_launch_blocks - kReservedSharedBytes)
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

// Calls f.template operator()<kIsRows, V>() with a kernel's template parameters for a plan. kIsRows: the
// kernel walks rows, otherwise planes, see plan.h. V: elements of a vector, which is 16 bytes or one element.
template <class T, class F>
void dispatch_kernel_of_plan(const LaunchPlan& plan, const F& f) {
  if (plan.is_rows)
    plan.is_vectorized ? f.template operator()<true, kVectorWidth<T>>() : f.template operator()<true, 1>();
  else
    plan.is_vectorized ? f.template operator()<false, kVectorWidth<T>>() : f.template operator()<false, 1>();
}

// The launch bounds of bn_forward and layer_norm_forward add this number to their blocks per multiprocessor.
// One more block makes them faster on sm_90; on other architectures the compiler would spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kExtraBlocksOnSm90 = 1;
#else
constexpr int kExtraBlocksOnSm90 = 0;
#endif

// How many blocks of a kernel are resident on a multiprocessor, if they have no dynamic shared memory.
inline int count_resident_blocks(const LaunchContext& context, const void* kernel) {
  return cached_query(kernel, context.device_index, [&](int& value) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, kThreads, 0);
  });
}

// Returns a function for LaunchPlanner::plan. That function takes a plan, and returns how many blocks of the
// plan's kernel, kernel_of<kIsRows, V>(), are resident on a multiprocessor. No other kernel is queried:
// a query loads the kernel, loading may wait for the GPU, and the GPU may wait for other ranks.
template <class T, class KernelOf>
auto make_resident_blocks_query(const LaunchContext& context, const KernelOf& kernel_of) {
  return [&](const LaunchPlan& plan) {
    int blocks = 0;
    dispatch_kernel_of_plan<T>(plan, [&]<bool kIsRows, int V>() {
      blocks = count_resident_blocks(
          context, reinterpret_cast<const void*>(kernel_of.template operator()<kIsRows, V>()));
    });
    return blocks;
  };
}

// Declares an array `name`: the block's dynamic shared memory. The CPU model of CUDA has its own definition.
#ifndef FASTVIT_DYNAMIC_SHARED
#define FASTVIT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// The one parameter of every kernel. From sm_90 on a kernel's blocks may begin while the stream's previous
// kernel ends. Memory may be accessed only after that end, so the pointers to it can only be reached through
// get_after_previous_kernel().
template <class Params>
class KernelParams {
  Params params;

 public:
  explicit KernelParams(const Params& params) : params(params) {}

  // Every thread calls this before it does anything else. It waits until the stream's previous kernel, and
  // with it every earlier kernel, has ended. Once all blocks have called it, blocks of the next kernel may
  // begin where multiprocessors have room; they wait in this function. A grid that waits for other ranks (its
  // parameters have a group_exchange) does not let the next kernel begin: two waiting grids could occupy the
  // whole GPU, without room for NCCL's blocks.
  __device__ __forceinline__ const Params& get_after_previous_kernel() const {
    wait_for_previous_kernel();
    if constexpr (!requires { params.group_exchange; }) let_next_kernel_begin();
    return params;
  }
};

struct LaunchConfig {
  int64_t blocks;
  const LaunchContext& context;
  size_t shared_bytes = 0;  // dynamic shared memory of a block
  // Whether all blocks must be resident at the same time. If they cannot be, the launch returns
  // cudaErrorCooperativeLaunchTooLarge.
  bool cooperative = false;
};

// Launches a kernel and returns CUDA's status, without a check. A launch that is not cooperative may begin
// while the stream's previous kernel ends, if the kernel's code waits for that end. Code for sm_90 and later
// does.
template <class Params>
cudaError_t launch(void (*kernel)(KernelParams<Params>), const LaunchConfig& config, const Params& params) {
  if (config.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  // The kernel is asked, not the device: the driver of a new GPU may have compiled the kernel from PTX for an
  // older architecture. Such code does not wait.
  const int code_architecture =
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
  cuda_config.numAttrs = config.cooperative || code_architecture >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&cuda_config, kernel, KernelParams<Params>(params));
}

// Launches the plan's kernel, which kernel_of<kIsRows, V>() returns; raises if the launch fails.
template <class T, class KernelOf, class Params>
void launch_planned(const LaunchPlan& plan, const KernelOf& kernel_of, const LaunchConfig& config,
                    const Params& params) {
  dispatch_kernel_of_plan<T>(plan, [&]<bool kIsRows, int V>() {
    STD_CUDA_CHECK(launch(kernel_of.template operator()<kIsRows, V>(), config, params));
  });
}

}  // namespace fastvit
