// Functions by inline PTX, for instructions that C++ and CUDA's intrinsics do not offer: wide and hinted
// accesses, ordered counters, the overlap of kernels, a clock, and the packets that GPUs exchange. Also the
// report of a fault, which the host reads while the kernel runs.
//
// The CPU model of CUDA has no PTX, so each function with PTX has a second definition for it
// (CUDA_HOST_EMULATION). There a packet of 16 bytes is two atomic accesses of 8 bytes, since another thread
// may access it at the same time.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <cuda/atomic>

#include "../sync/protocol.h"

namespace fastvit {

// Atomic access to a T that other GPUs and the host access too (system), or only blocks of this GPU (device).
template <class T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;
template <class T>
using DeviceAtomic = cuda::atomic_ref<T, cuda::thread_scope_device>;

// kEvictFirst: the loaded data leaves the L2 cache first (hint .cs), so that the kernel's output replaces
// this data and not data that is still to be read.
enum CacheHint { kNoCacheHint, kEvictFirst };

#ifdef CUDA_HOST_EMULATION
template <CacheHint kHint, class Words>
Words load_wide(const Words* source) {
  return *source;
}
template <class Words>
void store_wide(Words* destination, Words value) {
  *destination = value;
}
inline void prefetch(const void*) {}
inline unsigned increment_wrapping(unsigned* counter, unsigned max_value,
                                   CUDA_HOST_AT) {  // the caller's place, for the race checker
  const auto next = [=](unsigned old_value) { return old_value >= max_value ? 0 : old_value + 1; };
  return cuda_host::rmw(counter, next, CUDA_HOST_LOC, cuda_host::acq_rel, cuda_host::gpu);
}
using cuda_host::globaltimer;
using cuda_host::let_next_kernel_begin;
using cuda_host::wait_for_previous_kernel;
inline void store_two_halves(uint64_t* destination, uint64_t half0, uint64_t half1) {
  SystemAtomic<uint64_t>(destination[0]).store(half0, cuda::std::memory_order_relaxed);
  SystemAtomic<uint64_t>(destination[1]).store(half1, cuda::std::memory_order_relaxed);
}
inline void load_two_halves(uint64_t* source, uint64_t& half0, uint64_t& half1) {
  half0 = SystemAtomic<uint64_t>(source[0]).load(cuda::std::memory_order_relaxed);
  half1 = SystemAtomic<uint64_t>(source[1]).load(cuda::std::memory_order_relaxed);
}
#else
// Load 16 or 8 bytes from aligned global memory, or store them, in one instruction. The compiler splits the
// assignment of a uint4 into four accesses, and merges them again only where it can prove their alignment.
template <CacheHint kHint>
__device__ __forceinline__ uint4 load_wide(const uint4* source) {
  uint4 value;
  if constexpr (kHint == kEvictFirst)
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(source))
                 : "memory");
  else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(source))
                 : "memory");
  return value;
}
__device__ __forceinline__ void store_wide(uint4* destination, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(destination)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
template <CacheHint kHint>
__device__ __forceinline__ uint2 load_wide(const uint2* source) {
  static_assert(kHint == kNoCacheHint, "a hint is supported for loads of 16 bytes only");
  uint2 value;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(__cvta_generic_to_global(source))
               : "memory");
  return value;
}
__device__ __forceinline__ void store_wide(uint2* destination, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(destination)), "r"(value.x),
               "r"(value.y)
               : "memory");
}
// Begins to read the memory at `source` into the L2 cache, where a later load finds it.
__device__ __forceinline__ void prefetch(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(source)));
}
// Increments the counter, which wraps to 0 after max_value, and returns its old value. Whoever increments it
// later sees what this thread wrote before: acquire and release order for all blocks of the GPU.
__device__ __forceinline__ unsigned increment_wrapping(unsigned* counter, unsigned max_value) {
  unsigned old_value;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old_value)
               : "l"(__cvta_generic_to_global(counter)), "r"(max_value)
               : "memory");
  return old_value;
}
// Waits until the stream's previous kernel has ended and its writes can be seen. Before sm_90 kernels of a
// stream do not overlap, so there is nothing to wait for.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows blocks of the stream's next kernel to begin once every block of this grid has called this or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Returns the GPU's clock in nanoseconds.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}
// Store or load the halves, 8 bytes each, of 16 aligned bytes that another GPU may access at the same time.
// Each half is written or read as a whole, but the 16 bytes may not be.
__device__ __forceinline__ void store_two_halves(uint64_t* destination, uint64_t half0, uint64_t half1) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(destination)),
               "l"(half0), "l"(half1)
               : "memory");
}
__device__ __forceinline__ void load_two_halves(uint64_t* source, uint64_t& half0, uint64_t& half1) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(half0), "=l"(half1)
               : "l"(__cvta_generic_to_global(source))
               : "memory");
}
#endif

// Store or load a packet, the 16 bytes in which ranks exchange data. It has two halves of 8 bytes, each with
// a data word and the epoch (the number of the exchange). A half is written or read as a whole, so a half
// with the expected epoch has the word of that exchange. The accesses are relaxed: they do not order accesses
// to other memory.
__device__ __forceinline__ void store_packet(peer::Packet* destination, const peer::Packet& packet) {
  store_two_halves(reinterpret_cast<uint64_t*>(destination), packet.word0 | uint64_t(packet.epoch0) << 32,
                   packet.word1 | uint64_t(packet.epoch1) << 32);
}
__device__ __forceinline__ peer::Packet load_packet(peer::Packet* source) {
  uint64_t half0, half1;
  load_two_halves(reinterpret_cast<uint64_t*>(source), half0, half1);
  return {uint32_t(half0), uint32_t(half0 >> 32), uint32_t(half1), uint32_t(half1 >> 32)};
}

// Writes a report to memory of the host, which polls it while the kernel runs. The first word, `fault`, is
// written last, so a host that sees a fault sees the whole report. One thread calls.
__device__ __forceinline__ void write_fault_report(peer::FaultReport* host_report,
                                                   const peer::FaultReport& report) {
  uint32_t words[sizeof(report) / sizeof(uint32_t)];
  memcpy(words, &report, sizeof(report));
  uint32_t* const host_words = reinterpret_cast<uint32_t*>(host_report);
  for (unsigned i = 1; i < sizeof(words) / sizeof(uint32_t); ++i)
    SystemAtomic<uint32_t>(host_words[i]).store(words[i], cuda::std::memory_order_relaxed);
  SystemAtomic<uint32_t>(host_words[0]).store(words[0], cuda::std::memory_order_release);
}

}  // namespace fastvit
