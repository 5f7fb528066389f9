// Memory of a launch. Scratch is memory from torch's caching allocator. MergeMemory is what merge_slices.cuh
// needs: results of slices, and semaphores (counters by which blocks of a launch know of each other).
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "launch.cuh"
#include "merge_slices.cuh"

namespace fastvit {

// Memory for kernels that are launched on the current stream while this object lives. torch's allocator gives
// freed memory only to later work of the same stream, so the host does not wait for the kernels.
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

// Returns the kMaxSemaphores + kExchangeCounters counters of the current stream. They are zero before every
// launch, and the kernel leaves them as zeros. No two kernels of a stream access memory at the same time
// (KernelParams waits for the previous kernel), so all launches of a stream share the counters.
//
// The counters are allocated once and never freed. They are not from torch's allocator, since that may take
// them from the memory pool of a CUDA graph, to which they must be returned. The counters are found by the
// stream's id, not by its handle: the handle of a destroyed stream may be given to a new one while work of
// the old one still runs.
inline unsigned* stream_semaphores(const LaunchContext& context) {
  static std::mutex mutex;
  // (device, stream id) -> counters
  static std::map<std::pair<int, unsigned long long>, unsigned*> counters_of_streams;
  unsigned long long stream_id = 0;
  STD_CUDA_CHECK(cudaStreamGetId(context.stream, &stream_id));
  const std::lock_guard lock(mutex);
  unsigned*& counters = counters_of_streams[{context.device_index, stream_id}];
  if (!counters) {
    void* data = nullptr;
    constexpr size_t bytes = (kMaxSemaphores + kExchangeCounters) * sizeof(unsigned);
    // In the default mode cudaMalloc would fail while another stream is captured into a graph.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t status = cudaMalloc(&data, bytes);
    STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    STD_CUDA_CHECK(status);
    STD_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, context.stream));
    counters = static_cast<unsigned*>(data);
  }
  return counters;
}

// The memory with which a launch merges slices. A slice is a share of a channel's values that one block
// reduces. With has_exchange there are also the counters of the exchange between ranks. By these a block
// learns whether it is one of the last to finish; the last blocks wait for other ranks. A launch that is
// captured into a CUDA graph has counters of its own, which the graph clears: the graph may run on any
// stream, at the same time as other work. R: a slice's result for one channel, such as PartialMoments.
template <class R>
class MergeMemory {
 public:
  MergeMemory(const LaunchPlan& plan, const LaunchContext& context, bool has_exchange = false)
      : groups(plan),
        semaphore_count(plan.slices > 1 ? groups.semaphores(plan) : 0),
        is_captured((plan.slices > 1 || has_exchange) && is_capturing(context)),
        result_bytes(plan.slices > 1 ? int64_t(plan.slices) * plan.layout.channels * int64_t(sizeof(R)) : 0),
        scratch(result_bytes + (is_captured ? (semaphore_count + kExchangeCounters) * sizeof(unsigned) : 0)) {
    if (plan.slices == 1 && !has_exchange) return;
    if (is_captured) {
      semaphores = reinterpret_cast<unsigned*>(static_cast<char*>(scratch.data) + result_bytes);
      STD_CUDA_CHECK(cudaMemsetAsync(semaphores, 0, (semaphore_count + kExchangeCounters) * sizeof(unsigned),
                                     context.stream));
    } else {
      semaphores = stream_semaphores(context);
    }
    exchange_counters = semaphores + semaphore_count;
  }
  SliceResults<R> slice_results() const { return {static_cast<R*>(scratch.data), semaphores, groups}; }

 private:
  static bool is_capturing(const LaunchContext& context) {
    cudaStreamCaptureStatus status;
    STD_CUDA_CHECK(cudaStreamIsCapturing(context.stream, &status));
    return status != cudaStreamCaptureStatusNone;
  }
  MergeGroups groups;
  int64_t semaphore_count;  // without the counters of an exchange
  bool is_captured;
  int64_t result_bytes;
  Scratch scratch;
  unsigned* semaphores = nullptr;

 public:
  unsigned* exchange_counters = nullptr;
};

}  // namespace fastvit
