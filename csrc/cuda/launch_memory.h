// Memory of a launch: scratch from torch's caching allocator, and the semaphores by which slices are merged.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "launch.cuh"
#include "merge_slices.cuh"

namespace fastvit {

// Memory for the kernels that are launched on the current device while this object lives. The allocator
// reuses freed blocks in stream order, so the host does not wait.
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

// kMaxSemaphores + kExchangeCounters zeros of a stream, which every launch leaves as zeros. Launches of one
// stream use them one after the other (see KernelParams), so they share these, and no launch has to clear them.
// Never freed, so not from torch's allocator: a first use while a CUDA graph is warmed up would take memory
// of the graph's pool, which expects it back.
// By the stream's id: its handle may be given to another stream while work of a destroyed one still runs.
inline unsigned* stream_semaphores(const LaunchContext& context) {
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, unsigned*> semaphores;
  unsigned long long stream = 0;
  STD_CUDA_CHECK(cudaStreamGetId(context.stream, &stream));
  const std::lock_guard lock(mutex);
  unsigned*& mine = semaphores[{context.device_index, stream}];
  if (!mine) {
    void* data = nullptr;
    constexpr size_t bytes = (kMaxSemaphores + kExchangeCounters) * sizeof(unsigned);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another stream may be capturing
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t status = cudaMalloc(&data, bytes);
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    STD_CUDA_CHECK(status);
    STD_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, context.stream));
    mine = static_cast<unsigned*>(data);
  }
  return mine;
}

// Memory for merging slices: partial results and semaphores, and an exchange's where the grid's last blocks
// wait for other ranks. A captured launch has its own semaphores, which the graph clears, because the
// graph may run on any stream, at the same time as other work.
template <class R>
class MergeMemory {
 public:
  MergeMemory(const LaunchPlan& plan, const LaunchContext& context, bool has_exchange = false)
      : groups(plan),
        semaphore_count(plan.slices > 1 ? groups.semaphores(plan) : 0),
        captured((plan.slices > 1 || has_exchange) && capturing(context)),
        bytes(plan.slices > 1 ? int64_t(plan.slices) * plan.layout.channels * int64_t(sizeof(R)) : 0),
        scratch(bytes + (captured ? (semaphore_count + kExchangeCounters) * sizeof(unsigned) : 0)) {
    if (plan.slices == 1 && !has_exchange) return;
    if (captured) {
      semaphores = reinterpret_cast<unsigned*>(static_cast<char*>(scratch.data) + bytes);
      STD_CUDA_CHECK(cudaMemsetAsync(semaphores, 0, (semaphore_count + kExchangeCounters) * sizeof(unsigned),
                                     context.stream));
    } else {
      semaphores = stream_semaphores(context);
    }
    exchange_counters = semaphores + semaphore_count;
  }
  SliceResults<R> slice_results() const { return {static_cast<R*>(scratch.data), semaphores, groups}; }

 private:
  static bool capturing(const LaunchContext& context) {
    cudaStreamCaptureStatus status;
    STD_CUDA_CHECK(cudaStreamIsCapturing(context.stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }
  MergeGroups groups;
  int64_t semaphore_count;  // semaphores of the tiles
  bool captured;
  int64_t bytes;
  Scratch scratch;
  unsigned* semaphores = nullptr;

 public:
  unsigned* exchange_counters = nullptr;
};

}  // namespace fastvit
