// The device of an op, its stream, and CUDA's answers about it.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "plan.h"

namespace fastvit {

// CUDA's answer about `subject` on `device`. Each thread asks once, for each type of `ask`:
// ask(int& answer) returns a cudaError_t.
template <class Ask>
int asked_once(const void* subject, int device, const Ask& ask) {
  thread_local std::map<std::pair<const void*, int>, int> answers;
  const auto known = answers.find({subject, device});
  if (known != answers.end()) return known->second;
  int answer = 0;
  STD_CUDA_CHECK(ask(answer));
  return answers[{subject, device}] = answer;
}

// Shared memory of a block without packets: the most that merging and per-channel tables take in a kernel
// (rows of 16-bit elements), and the system's 1 KiB.
constexpr int kOtherSharedBytes = 32 << 10;

// FASTVIT_ON_CHIP=0: local ops are two kernels each, for comparison. Read once per process.
inline bool on_chip_wanted() {
  static const bool wanted = [] {
    const char* const variable = std::getenv("FASTVIT_ON_CHIP");
    const std::string_view value = variable ? variable : "1";
    if (value != "0" && value != "1")
      throw std::runtime_error("FASTVIT_ON_CHIP is '" + std::string(value) + "'; 0 or 1 expected");
    return value == "1";
  }();
  return wanted;
}

// Makes the input's device current, and has its current stream and its properties.
class Device {
 public:
  explicit Device(int index) : guard(index) {
    void* s = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &s));
    stream = static_cast<cudaStream_t>(s);
    STD_CUDA_CHECK(cudaGetDevice(&current));
    limits.multiprocessors = attribute<cudaDevAttrMultiProcessorCount>();
    early_launches = attribute<cudaDevAttrComputeCapabilityMajor>() >= 9;
    const int shared = attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    limits.smem_cache_bytes = on_chip_wanted() ? std::max(0, shared / kOnChipBlocks - kOtherSharedBytes) : 0;
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
  bool early_launches;  // see Launch::early
};

}  // namespace fastvit
