// A kernel's report to the host, which does not wait for the kernel.
#pragma once

#include <cstring>

#include "ptx.cuh"

namespace fastvit {

// Called by one thread. The fault, which the host polls, is written last.
__device__ __forceinline__ void tell_host(peer::FaultReport* host, const peer::FaultReport& report) {
  uint32_t words[sizeof(report) / sizeof(uint32_t)];
  memcpy(words, &report, sizeof(report));
  uint32_t* const to = reinterpret_cast<uint32_t*>(host);
  for (unsigned i = 1; i < sizeof(words) / sizeof(uint32_t); ++i)
    SystemAtomic<uint32_t>(to[i]).store(words[i], cuda::std::memory_order_relaxed);
  SystemAtomic<uint32_t>(to[0]).store(words[0], cuda::std::memory_order_release);
}

}  // namespace fastvit
