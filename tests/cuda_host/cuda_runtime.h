// Test-only stand-in for <cuda_runtime.h>: runs CUDA kernels on the CPU when the .cu/.cuh is built by
// `g++ -x c++ -Itests/cuda_host`. One fiber per CUDA thread; see engine.cpp. It has only what the kernels of
// this project need; other uses of CUDA do not compile.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUDA_HOST_EMULATION 1
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static thread_local  // per block: engine.cpp poisons and swaps this module's TLS segment
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CUDA_HOST_AT const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define CUDA_HOST_LOC \
  ::cuda_host::Loc {  \
    file_, line_      \
  }
#define CUDA_HOST_RAW __attribute__((no_sanitize("thread"), noinline))  // invisible to race.cpp's hooks

// ---- vector types: real alignment, so that UBSan reports misaligned 8/16-byte loads ----
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// ---- runtime API: the part launchers use ----
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotSupported = 801
};
using cudaStream_t = struct CUstream_st*;
enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
  int cooperative, programmaticStreamSerializationAllowed;
  char pad[64];
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrCooperativeLaunch = 95
};

namespace cuda_host {
struct Loc {
  const char* file;
  int line;
};
struct Config {           // set from the test
  uint64_t seed = 0;      // 0: threads and blocks in index order; else a random but repeatable schedule
  int sm_count = 4;       // cudaDevAttrMultiProcessorCount
  int blocks_per_sm = 2;  // limit for co-resident (cooperative) blocks, together with 2048 threads per SM
  int shared_per_sm = 228 << 10;  // bytes of shared memory, which limit co-resident blocks too
  bool capturing = false;         // the result of cudaStreamIsCapturing
  bool built = true;              // the kernels have code for the device
  bool checks_races = true;       // in the race build; without, it only counts bytes, and is faster
  bool cooperative = true;        // cudaDevAttrCooperativeLaunch
  uint64_t stream = 0;            // the current stream
  int resident = 0;       // > 0: blocks that a device holds at most, of all streams; 0: a few of each grid
  bool deferred = false;  // launches queue up per (device, stream); cuda_host::run() runs the queues together
};
Config& config();
void run();              // run deferred launches, all devices/streams interleaved
uint64_t steps();        // number of fiber switches so far
uint64_t launches();     // of kernels
uint64_t queries();      // of attributes of devices and kernels, and settings of kernels'
uint64_t& memsets();     // on a stream
uint64_t blocks();       // of the latest launch
uint64_t globaltimer();  // nanoseconds; jumps ahead when all threads only wait
void wait_for_previous_kernel();
void let_next_kernel_begin();
// Bytes of global memory that kernels have read and written so far, in the race build; zeros in others.
std::pair<uint64_t, uint64_t> bytes();
cudaError_t launch(const cudaLaunchConfig_t&, const void* fn, std::function<void()> thread_body);
void enqueue(cudaStream_t, std::function<void()> host_op);
void* dynamic_shared();
#define FASTVIT_DYNAMIC_SHARED(name) \
  unsigned char* const name = static_cast<unsigned char*>(cuda_host::dynamic_shared())
[[noreturn]] void fail(const char* what, Loc at);
enum class Op : int { none, barrier, barrier_or, shfl };
int block_barrier(Op, int pred, Loc);
uint64_t shuffle(unsigned mask, uint64_t value, int source_lane, Loc);
unsigned lane();
enum Scope { sys = 0, gpu = 1 };
enum Order { relaxed = 0, acquire = 1, release = 2, acq_rel = 3 };
void atomic_pre(Loc);  // may hand over to another thread
void atomic_post(const void*, uint64_t seen, size_t size, bool wrote, bool rmw, int order, int scope, Loc);
template <class T>
uint64_t bits(T v) {
  uint64_t b = 0;
  std::memcpy(&b, &v, sizeof(T) < 8 ? sizeof(T) : 8);
  return b;
}
// Plain accesses, since one OS thread runs everything.
template <class T, class F>
CUDA_HOST_RAW T rmw(T* p, F f, Loc at, int order = relaxed, int scope = gpu) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4- or 8-byte atomics only");
  atomic_pre(at);
  const T before = *p, after = f(before);
  *p = after;
  atomic_post(p, bits(before), sizeof(T), bits(after) != bits(before), true, order, scope, at);
  return before;
}
template <class T>
CUDA_HOST_RAW T load(const T* p, Loc at, int order, int scope) {
  atomic_pre(at);
  const T v = *p;
  atomic_post(p, bits(v), sizeof(T), false, false, order, scope, at);
  return v;
}
template <class T>
CUDA_HOST_RAW void store(T* p, T v, Loc at, int order, int scope) {
  atomic_pre(at);
  atomic_post(p, bits(v), sizeof(T), true, false, order, scope, at);
  *p = v;
}
}  // namespace cuda_host

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... a) {
  static_assert((std::is_trivially_copyable_v<std::decay_t<P>> && ...),
                "kernel parameters must be trivially copyable");
  static_assert((!std::is_reference_v<P> && ...), "kernel parameters are passed by value");
  std::tuple<std::decay_t<P>...> args(std::forward<A>(a)...);
  // The hooks of race.cpp do not see the copies of the parameters, which no kernel wrote.
  const auto body = [kernel, args]() CUDA_HOST_RAW {
    std::apply([kernel](auto&... values) CUDA_HOST_RAW { kernel(values...); }, args);
  };
  return cuda_host::launch(*c, reinterpret_cast<const void*>(kernel), body);
}
cudaError_t cuda_host_set_smem(const void* fn, int bytes);
cudaError_t cuda_host_resident(int* blocks, int threads, size_t smem);
cudaError_t cuda_host_attributes(cudaFuncAttributes*);
template <class K>
cudaError_t cudaFuncSetAttribute(K* k, cudaFuncAttribute, int v) {
  return cuda_host_set_smem(reinterpret_cast<const void*>(k), v);
}
template <class K>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, K*) {
  return cuda_host_attributes(attributes);
}
template <class K>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, K, int threads, size_t smem) {
  return cuda_host_resident(n, threads, smem);
}
cudaError_t cudaGetDevice(int*);
cudaError_t cudaSetDevice(int);
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr, int dev);
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cuda_host::config().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (posix_memalign(p, 512, bytes)) return cudaErrorInvalidValue;
  return std::memset(*p, 0xff, bytes), cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t e) {
  return e ? "emulated CUDA error" : "no error";
}
inline cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s = nullptr) {
  ++cuda_host::memsets();
  return cuda_host::enqueue(s, [=] { std::memset(p, v, n); }), cudaSuccess;
}

#include "device_builtins.h"
