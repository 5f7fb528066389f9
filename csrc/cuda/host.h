// Between torch and the kernels: device, stream, scratch memory and the choice of a kernel's template.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "../sync/cuda_peer.cuh"
#include "backend.h"
#include "channels.cuh"
#include "gradient.cuh"
#include "normalise.cuh"
#include "plan.h"
#include "smem_cache.cuh"
#include "vector_io.cuh"

namespace fastvit {

// Shared memory of a block that holds no packets: what merging and per-channel tables take in the hungriest
// kernel (rows of 16-bit elements), and the system's 1 KiB.
constexpr int kOtherSharedBytes = 32 << 10;

// FASTVIT_ON_CHIP=0: local ops are two kernels each, for comparison. Read once per process.
inline bool on_chip_wanted() {
  static const bool wanted = [] {
    const char* const wish = std::getenv("FASTVIT_ON_CHIP");
    const std::string_view said = wish ? wish : "1";
    if (said != "0" && said != "1")
      throw std::runtime_error("FASTVIT_ON_CHIP is '" + std::string(said) + "'; 0 or 1 expected");
    return said == "1";
  }();
  return wanted;
}

// The input's device, made current, and its current stream.
class Device {
 public:
  explicit Device(int index) : guard(index) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &s));
    stream = static_cast<cudaStream_t>(s);
    STD_CUDA_CHECK(cudaGetDevice(&current));
    limits.multiprocessors = attribute<cudaDevAttrMultiProcessorCount>();
    const int shared = attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    limits.smem_cache_bytes = on_chip_wanted() ? std::max(0, shared / kOnChipBlocks - kOtherSharedBytes) : 0;
  }

 private:
  template <cudaDeviceAttr kAttribute>  // of the current device, which is asked once
  int attribute() const {
    static std::atomic<int> known[kDevices];  // 0: not asked yet
    int value = current < kDevices ? known[current].load() : 0;
    if (value == 0) {
      STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, kAttribute, current));
      if (current < kDevices) known[current].store(value);
    }
    return value;
  }
  torch::stable::accelerator::DeviceGuard guard;

 public:
  cudaStream_t stream;
  int current;
  Limits limits;
};

// Memory from torch's caching allocator for the kernels launched on `device` while this object lives. Freed
// blocks are reused in stream order, so the host does not wait.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (bytes) TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data));
  }
  ~Scratch() {
    if (data) aoti_torch_cuda_caching_allocator_raw_delete(data);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data = nullptr;
};

// kSemaphoreWords zeros and one, which every launch leaves as zeros. Launches of one stream follow each
// other, so a stream has its own for as long as the process lives, and no launch has to clear them first.
inline unsigned* semaphores_of(const Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, unsigned*> semaphores;
  const std::lock_guard lock(mutex);
  unsigned*& mine = semaphores[{device.current, device.stream}];
  if (!mine) {
    void* data = nullptr;
    constexpr size_t bytes = (kSemaphoreWords + 1) * sizeof(unsigned);
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data));
    STD_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, device.stream));
    mine = static_cast<unsigned*>(data);
  }
  return mine;
}

// What the merging of slices needs: partial results and semaphores, and a counter of tiles where the grid's
// last block waits for other ranks. A launch that is captured into a graph gets semaphores of its own,
// cleared by the graph, because the graph may run on any stream beside any other work.
template <class R>
class Slices {
 public:
  Slices(const Plan& plan, const Device& device, bool shared = false)
      : groups(plan),
        words(plan.slices > 1 ? groups.semaphores(plan) : 0),
        captured((plan.slices > 1 || shared) && capturing(device)),
        bytes(plan.slices > 1 ? int64_t(plan.slices) * plan.layout.C * int64_t(sizeof(R)) : 0),
        scratch(bytes + (captured ? (words + 1) * sizeof(unsigned) : 0)) {
    if (plan.slices == 1 && !shared) return;
    if (captured) {
      semaphores = reinterpret_cast<unsigned*>(static_cast<char*>(scratch.data) + bytes);
      STD_CUDA_CHECK(cudaMemsetAsync(semaphores, 0, (words + 1) * sizeof(unsigned), device.stream));
    } else {
      semaphores = semaphores_of(device);
    }
    finished = semaphores + words;
  }
  Partials<R> partials() const { return {static_cast<R*>(scratch.data), semaphores, groups}; }

 private:
  static bool capturing(const Device& device) {
    cudaStreamCaptureStatus status;
    STD_CUDA_CHECK(cudaStreamIsCapturing(device.stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }
  SliceGroups groups;
  int64_t words;  // semaphores of the tiles
  bool captured;
  int64_t bytes;
  Scratch scratch;
  unsigned* semaphores = nullptr;

 public:
  unsigned* finished = nullptr;
};

// f(Shares<...>) for an exchange, or none.
template <class F>
void with_shares(const Exchange* exchange, const F& f) {
  exchange ? f(Shares<true>{*exchange}) : f(Shares<false>{});
}

inline ChannelArray per_channel(const Channels& t) {
  switch (t.dtype) {
    case ScalarType::Half:
      return {t.data, Storage::half};
    case ScalarType::BFloat16:
      return {t.data, Storage::bfloat16};
    case ScalarType::Double:
      return {t.data, Storage::twice};
    default:
      return {t.data, Storage::single};
  }
}

// f.template operator()<T>() for the activations' type.
template <class F>
void with_type(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Half:
      return f.template operator()<__half>();
    case ScalarType::BFloat16:
      return f.template operator()<__nv_bfloat16>();
    case ScalarType::Double:
      return f.template operator()<double>();
    default:
      return f.template operator()<float>();
  }
}

// f.template operator()<kRows, V>() for what the plan chose.
template <class T, class F>
void with_walk(const Plan& plan, const F& f) {
  if (plan.rows)
    plan.vector ? f.template operator()<true, kVector<T>>() : f.template operator()<true, 1>();
  else
    plan.vector ? f.template operator()<false, kVector<T>>() : f.template operator()<false, 1>();
}

// The same, of a plan that keeps packets on chip.
template <class T, class F>
void with_vector_walk(const Plan& plan, const F& f) {
  plan.rows ? f.template operator()<true, kVector<T>>() : f.template operator()<false, kVector<T>>();
}

// Blocks that a multiprocessor holds of a kernel. CUDA is asked once per thread, kernel and device.
inline int blocks_of(const Device& device, const void* kernel) {
  thread_local std::map<std::pair<const void*, int>, int> asked;
  int& known = asked[{kernel, device.current}];
  if (known == 0) STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&known, kernel, kThreads, 0));
  return known;
}

// For Planner::make: blocks that a multiprocessor holds of kernel_of<kRows, V>(), the kernel that a plan
// takes; of no other, as asking loads it, which may wait for the GPU and so for peers.
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

// Whether the blocks could be launched: where slices wait for each other they must all run at once.
template <auto kKernel, class Args>
bool launch_on_chip(const Plan& plan, int kept, const Device& device, const Args& args) {
  STD_CUDA_CHECK(allow_shared<kKernel>(device.current, int(device.limits.smem_cache_bytes)));
  const Launch how{plan.blocks(), device.stream, smem_cache_bytes(plan, kept), plan.slices > 1};
  const cudaError_t status = launch(kKernel, how, args);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    (void)cudaGetLastError();  // other work may hold multiprocessors back: two launches do it as well
    return false;
  }
  STD_CUDA_CHECK(status);
  return true;
}
// What the forward pass is given, local or not.
template <class A>
RunningStats<A> running_stats_of(const ForwardArgs& args) {
  return {args.layout.C,
          per_channel(args.running_mean),
          per_channel(args.running_var),
          args.num_batches_tracked,
          args.cumulative,
          args.momentum,
          A(args.eps),
          static_cast<A*>(args.saved)};
}

template <class T>
Activated<T> activated_of(const ForwardArgs& args) {
  using A = Accumulation<T>;
  return {per_channel(args.weight), per_channel(args.bias), gamma_floor<A>(args.in_place, args.dtype),
          args.activation, A(args.activation_param)};
}

// What the backward pass is given, for ReduceArgs and BackwardArgs alike.
template <class A, class Args>
Saved<A> saved_of(const Args& args) {
  return {args.layout.C,           static_cast<const A*>(args.saved),         per_channel(args.weight),
          per_channel(args.bias),  gamma_floor<A>(args.in_place, args.dtype), args.activation,
          A(args.activation_param)};
}

// f.template operator()<kKept>().
template <class Args, class F>
void with_kept(const Args& args, const F& f) {
  if (args.in_place)
    f.template operator()<Kept::output>();
  else if (args.z)
    f.template operator()<Kept::input_and_residual>();
  else
    f.template operator()<Kept::input>();
}

}  // namespace fastvit
