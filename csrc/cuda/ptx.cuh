// Inline PTX for instructions without a C++ intrinsic, and functions built on it: accesses to memory that
// other GPUs or the host access too. The CPU model of CUDA has no PTX. It has its own clock, and two stores
// or loads of 8 bytes for a packet of 16 that another thread may access at the same time.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <cuda/atomic>

#include "../sync/protocol.h"

namespace fastvit {

template <class T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;
template <class T>
using DeviceAtomic = cuda::atomic_ref<T, cuda::thread_scope_device>;

// kEvictFirst loads with the hint .cs (evicted first), so that the kernel's output replaces this data in the
// L2 cache, and not data that is still to be read.
enum CacheHint { kNoHint, kEvictFirst };

#ifdef CUDA_HOST_EMULATION
template <CacheHint kHint, class Words>
Words load_wide(const Words* from) {
  return *from;
}
template <class Words>
void store_wide(Words* to, Words value) {
  *to = value;
}
inline void prefetch(const void*) {}
inline unsigned increment_wrapping(unsigned* counter, unsigned most, CUDA_HOST_AT) {
  const auto next = [=](unsigned before) { return before >= most ? 0 : before + 1; };
  return cuda_host::rmw(counter, next, CUDA_HOST_LOC, cuda_host::acq_rel, cuda_host::gpu);
}
using cuda_host::globaltimer;
using cuda_host::let_next_kernel_begin;
using cuda_host::wait_for_previous_kernel;
inline void store_two_words(uint64_t* to, uint64_t first, uint64_t second) {
  SystemAtomic<uint64_t>(to[0]).store(first, cuda::std::memory_order_relaxed);
  SystemAtomic<uint64_t>(to[1]).store(second, cuda::std::memory_order_relaxed);
}
inline void load_two_words(uint64_t* from, uint64_t& first, uint64_t& second) {
  first = SystemAtomic<uint64_t>(from[0]).load(cuda::std::memory_order_relaxed);
  second = SystemAtomic<uint64_t>(from[1]).load(cuda::std::memory_order_relaxed);
}
#else
// Accesses to global memory of 16 or 8 bytes. The compiler splits the assignment of a uint4 into four
// accesses, and merges them again only where it can prove their alignment.
template <CacheHint kHint>
__device__ __forceinline__ uint4 load_wide(const uint4* from) {
  uint4 value;
  if constexpr (kHint == kEvictFirst)
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
  return value;
}
__device__ __forceinline__ void store_wide(uint4* to, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
template <CacheHint kHint>
__device__ __forceinline__ uint2 load_wide(const uint2* from) {
  static_assert(kHint == kNoHint, "streaming loads take 16 bytes or one element");
  uint2 value;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}
__device__ __forceinline__ void store_wide(uint2* to, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x),
               "r"(value.y)
               : "memory");
}
// Asks for the memory at `from`, which a load finds in the L2 cache later.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}
// The counter before it is counted up, from `most` to 0. Orders the thread's earlier writes before it and its
// later reads behind it, for all blocks.
__device__ __forceinline__ unsigned increment_wrapping(unsigned* counter, unsigned most) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(most)
               : "memory");
  return before;
}
// Of a stream's kernels; see KernelParams. Before sm_90 they do not overlap.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ uint64_t globaltimer() {  // timeout_ns
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void store_two_words(uint64_t* to, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "l"(first),
               "l"(second)
               : "memory");
}
__device__ __forceinline__ void load_two_words(uint64_t* from, uint64_t& first, uint64_t& second) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
}
#endif

// Relaxed, of system scope; each half of a packet is atomic.
__device__ __forceinline__ void store_packet(peer::Packet* to, const peer::Packet& p) {
  store_two_words(reinterpret_cast<uint64_t*>(to), p.word0 | uint64_t(p.epoch0) << 32,
                  p.word1 | uint64_t(p.epoch1) << 32);
}
__device__ __forceinline__ peer::Packet load_packet(peer::Packet* from) {
  uint64_t first, second;
  load_two_words(reinterpret_cast<uint64_t*>(from), first, second);
  return {uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32)};
}

// A report to the host, which does not wait for the kernel. One thread calls. The fault, which the host
// polls, is written last.
__device__ __forceinline__ void write_fault_report(peer::FaultReport* host, const peer::FaultReport& report) {
  uint32_t words[sizeof(report) / sizeof(uint32_t)];
  memcpy(words, &report, sizeof(report));
  uint32_t* const to = reinterpret_cast<uint32_t*>(host);
  for (unsigned i = 1; i < sizeof(words) / sizeof(uint32_t); ++i)
    SystemAtomic<uint32_t>(to[i]).store(words[i], cuda::std::memory_order_relaxed);
  SystemAtomic<uint32_t>(to[0]).store(words[0], cuda::std::memory_order_release);
}

}  // namespace fastvit
