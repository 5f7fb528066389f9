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

#include "../arguments.h"
#include "plan.h"
#include "vector_io.cuh"

namespace fastvit {

// CUDA's answer about `subject` on `device`. Each thread asks once, for each type of `ask`:
// ask(int& answer) returns a cudaError_t. Every kernel is asked about before its first launch, and so is
// refused here where this GPU cannot run it.
template <class Ask>
int asked_once(const void* subject, int device, const Ask& ask) {
  thread_local std::map<std::pair<const void*, int>, int> answers;
  const auto known = answers.find({subject, device});
  if (known != answers.end()) return known->second;
  int answer = 0;
  const cudaError_t status = ask(answer);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    (void)cudaGetLastError();
    throw std::runtime_error(
        "the CUDA kernels have no code for this GPU; build fastvit with TORCH_CUDA_ARCH_LIST of its compute "
        "capability (`python -m fastvit.info` names both)");
  }
  STD_CUDA_CHECK(status);
  return answers[{subject, device}] = answer;
}

// Shared memory of a block without vectors: the most that merging and per-channel tables take in a kernel
// (rows of 16-bit elements), and the system's 1 KiB.
constexpr int kOtherSharedBytes = 32 << 10;

// From so much shared memory of a multiprocessor on, two blocks have room for more than a batch of every
// operand: A100, H100, B200 and theirs, not those of graphics cards and of the T4, which have 100 KB or less.
constexpr int kSharedOfTwo = 128 << 10;

// Makes the input's device current, and has its current stream and its properties.
class Device {
 public:
  explicit Device(int index) : guard(index) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &s));
    stream = static_cast<cudaStream_t>(s);
    STD_CUDA_CHECK(cudaGetDevice(&current));
    limits.multiprocessors = attribute<cudaDevAttrMultiProcessorCount>();
    const int shared = attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    limits.on_chip_blocks = shared < kSharedOfTwo ? 1 : kResident;
    // The blocks of a local op wait for each other.
    limits.smem_cache_bytes = attribute<cudaDevAttrCooperativeLaunch>()
                                  ? std::max(0, shared / limits.on_chip_blocks - kOtherSharedBytes)
                                  : 0;
  }

 private:
  template <cudaDeviceAttr kAttribute>
  int attribute() const {
    return asked_once(nullptr, current,
                      [&](int& value) { return cudaDeviceGetAttribute(&value, kAttribute, current); });
  }
  torch::stable::accelerator::DeviceGuard guard;

 public:
  cudaStream_t stream;
  int current;
  Limits limits;
};

// f.template operator()<kRows, V>() for a plan.
template <class T, class F>
void with_walk(const Plan& plan, const F& f) {
  if (plan.rows)
    plan.vector ? f.template operator()<true, kVector<T>>() : f.template operator()<true, 1>();
  else
    plan.vector ? f.template operator()<false, kVector<T>>() : f.template operator()<false, 1>();
}

// Blocks of a kernel that fit on a multiprocessor, without dynamic shared memory.
inline int blocks_of(const Device& device, const void* kernel) {
  return asked_once(kernel, device.current, [&](int& value) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, kThreads, 0);
  });
}

// For Planner::plan: the blocks per multiprocessor of kernel_of<kRows, V>(), the kernel of a plan. No other
// kernel is asked about, since that loads it, which may wait for the GPU and so for peers.
template <class T, class KernelOf>
auto resident_blocks(const Device& device, const KernelOf& kernel_of) {
  return [&](const Plan& plan) {
    int blocks = 0;
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      blocks = blocks_of(device, reinterpret_cast<const void*>(kernel_of.template operator()<kRows, V>()));
    });
    return blocks;
  };
}

// What a kernel of an op takes: the op's arguments, and how its work is divided.
template <class Args, class Division = Plan>
struct Planned : Args {
  Division plan;
};

// Declares `name` as the launch's dynamic shared memory.
#ifndef FASTVIT_DYNAMIC_SHARED
#define FASTVIT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// What a kernel takes. From sm_90 on its blocks begin while the previous kernel of the stream ends, so
// nothing that the parameters point to may be read or written before begin(), which alone gives them.
template <class Params>
class Launched {
  Params params;

 public:
  explicit Launched(const Params& params) : params(params) {}

  // All threads call it first. Waits until the previous kernel has ended, and so all before it. From then on
  // the next kernel's blocks may take the multiprocessors that this grid leaves, in order to wait there; but
  // not while this grid waits for other ranks, since a grid of waiting blocks leaves no room for NCCL.
  __device__ __forceinline__ const Params& begin() const {
    wait_for_previous_kernel();
    if constexpr (!requires { params.peers; }) let_next_kernel_begin();
    return params;
  }
};

struct Launch {
  int64_t blocks;
  const Device& device;
  size_t shared_bytes = 0;   // dynamic
  bool cooperative = false;  // all blocks resident at once, or cudaErrorCooperativeLaunchTooLarge
};

template <class Params>
cudaError_t launch(void (*kernel)(Launched<Params>), const Launch& how, const Params& params) {
  if (how.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Not the device's version: code for it may be made of an older one's PTX, which does not wait.
  const int version = asked_once(reinterpret_cast<const void*>(kernel), how.device.current, [&](int& value) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    value = attributes.ptxVersion;
    return status;
  });
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
  config.stream = how.device.stream;
  config.attrs = &attribute;
  config.numAttrs = how.cooperative || version >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Launched<Params>(params));
}

// Launches kernel_of<kRows, V>(), the kernel of a plan.
template <class T, class KernelOf, class Params>
void launch_planned(const Plan& plan, const KernelOf& kernel_of, const Launch& how, const Params& params) {
  with_walk<T>(plan, [&]<bool kRows, int V>() {
    STD_CUDA_CHECK(launch(kernel_of.template operator()<kRows, V>(), how, params));
  });
}

}  // namespace fastvit
