// Seeded bugs, which the model of CUDA must report: `seeded N` runs the N-th, at a size where a GPU would
// often still give the right result. Without arguments it lists them, each after the builds that must report
// it (plain, asan, race; "none" for correct controls, which no build may report). Exit code: 0 right result
// and no report, 2 wrong result, 3 report of the engine; otherwise a sanitizer's.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda/atomic>
#include <stdexcept>
#include <vector>

#include "../../csrc/cuda/ptx.cuh"

struct How {
  dim3 grid, block = dim3(32);
  size_t shared_bytes = 0;
  bool cooperative = false;
  uintptr_t stream = 0;
  bool early = false;
};
template <class... P, class... A>
cudaError_t launch(const How& how, void (*kernel)(P...), A... arguments) {
  cudaLaunchAttribute attribute[2];
  attribute[0].id = cudaLaunchAttributeCooperative;
  attribute[0].val.cooperative = how.cooperative;
  attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[1].val.programmaticStreamSerializationAllowed = how.early;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(how.stream);
  config.attrs = attribute;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}

// The sum of 256 values through shared memory; K names the line that is left out.
enum Kind {
  ok,
  no_sync,
  no_sync_reuse,
  static_oob,
  divergent_barrier,
  early_return,
  divergent_shfl,
  ragged_shfl,
  shfl_dead_lane,
  lane_not_in_mask
};
template <int K>
__global__ void reduce_kernel(const float* x, float* out, int n, int rounds) {
  __shared__ float s[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = 0; r < rounds; ++r) {
    int i = r * blockDim.x + threadIdx.x;
    if (K == early_return && i >= n) return;
    float v = i < n ? x[i] : 0.f;
    if (K == divergent_shfl) {
      if (lane < 16) {
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
      } else
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    } else if (K == ragged_shfl) {
      for (int o = lane < 8 ? 16 : 8; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    } else if (K == shfl_dead_lane) {
      if (lane < 24)
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0x00ffffffu, v, o);
    } else if (K == lane_not_in_mask) {
      for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0x0000ffffu, v, o);
    } else {
      for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    }
    if (lane == 0) s[K == static_oob ? warp + 25 : warp] = v;
    if (K == divergent_barrier) {
      if (threadIdx.x < 128)
        __syncthreads();
      else
        __syncthreads();
    } else if (K != no_sync)
      __syncthreads();
    float t = 0;
    for (int k = 0; k < 8; ++k) t += s[K == static_oob ? k + 25 : k];
    if (threadIdx.x == 0) out[r] = t;
    if (K != no_sync_reuse) __syncthreads();
  }
}
__global__ void copy_kernel(const float* x, float* y, int n, int extra) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n + extra) y[i] = x[i];
}
__global__ void dyn_kernel(float* y, int n, int extra) {
  float* t = static_cast<float*>(cuda_host::dynamic_shared());
  for (int i = threadIdx.x; i < n + extra; i += blockDim.x) t[i] = float(i);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = t[n - 1 - i];
}
__global__ void uninit_kernel(float* y) {
  __shared__ float acc[32];
  if (threadIdx.x < 32) {
    acc[threadIdx.x] += 1.f;
    y[threadIdx.x] = acc[threadIdx.x];
  }
}
__global__ void vec_kernel(const float* x, float* y, int n) {
  for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
    float4 v = reinterpret_cast<const float4*>(x)[i];
    y[i] = v.x + v.y + v.z + v.w;
  }
}
// grid-wide sum: each block publishes, barrier, each block sums. mode: the fault of the barrier
enum Grid { g_ok, g_no_sync_before, g_no_sync_after, g_relaxed, g_no_reset, g_missing_arrival };
template <int M>
__global__ void grid_kernel(const float* x, float* part, float* out, unsigned* st) {
  if (M == g_missing_arrival && blockIdx.x == 2) return;
  part[blockIdx.x * blockDim.x + threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  if (M != g_no_sync_before) __syncthreads();
  if (threadIdx.x == 0) {
    constexpr auto rel = M == g_relaxed ? cuda::std::memory_order_relaxed : cuda::std::memory_order_acq_rel;
    constexpr auto acq = M == g_relaxed ? cuda::std::memory_order_relaxed : cuda::std::memory_order_acquire;
    cuda::atomic_ref<unsigned, cuda::thread_scope_device> count(st[0]), phase(st[1]);
    unsigned old = phase.load(cuda::std::memory_order_relaxed);
    if (count.fetch_add(1u, rel) == gridDim.x - 1) {
      if (M != g_no_reset) count.store(0u, cuda::std::memory_order_relaxed);
      phase.store(old + 1,
                  M == g_relaxed ? cuda::std::memory_order_relaxed : cuda::std::memory_order_release);
    } else
      while (phase.load(acq) == old) {
      }
  }
  if (M != g_no_sync_after) __syncthreads();
  float t = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) t += part[b * blockDim.x + threadIdx.x];
  out[blockIdx.x * blockDim.x + threadIdx.x] = t;
}
// two GPUs swap a vector. M: what is wrong
enum Peer { p_ok, p_device_scope, p_no_sync, p_single_buffer, p_trigger };
template <int M>
__global__ void peer_kernel(float* mine, float* theirs, unsigned* my_flag, unsigned* their_flag, float* out,
                            float v, unsigned epoch) {
  constexpr auto S = M == p_device_scope ? cuda::thread_scope_device : cuda::thread_scope_system;
  fastvit::wait_for_previous_kernel();
  if (M == p_trigger) fastvit::let_next_kernel_begin();
  const unsigned half = M == p_single_buffer ? 0 : (epoch & 1) * blockDim.x;
  theirs[half + threadIdx.x] = v + float(threadIdx.x);
  if (M != p_no_sync) __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<unsigned, S> out_flag(*their_flag), in_flag(*my_flag);
    out_flag.store(epoch, cuda::std::memory_order_release);
    while (in_flag.load(cuda::std::memory_order_acquire) < epoch) {
    }
  }
  __syncthreads();
  if (M == p_ok) fastvit::let_next_kernel_begin();
  out[threadIdx.x] = mine[half + threadIdx.x];
}
// adds 1 to a neighbour's number, as a kernel that begins before the previous one, which wrote x, has ended.
enum Early { e_ok, e_no_wait, e_late_wait, e_early_write };
template <int M>
__global__ void early_kernel(const float* x, float* y) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  float v = M == e_late_wait ? x[(i + 1) % n] : 0.f;
  if (M == e_early_write) y[i] = 0;
  if (M == e_late_wait || M == e_early_write) __syncthreads();
  if (M != e_no_wait) fastvit::wait_for_previous_kernel();
  fastvit::let_next_kernel_begin();
  if (M != e_late_wait) v = x[(i + 1) % n];
  y[i] = v + 1;
}

template <class T>
struct Buf {  // exact-size device buffer (host memory when emulated): red zones on both sides
  T* p;
  size_t n;
  explicit Buf(size_t n, T v = T()) : p((T*)malloc(n * sizeof(T))), n(n) {
    for (size_t i = 0; i < n; ++i) p[i] = v;
  }
  ~Buf() { free(p); }
};
static int bad(bool b) {
  return b ? 2 : 0;
}
template <int K>
int reduce(int n = 512) {
  Buf<float> x(n), out(2, -1.f);
  float want[2] = {0, 0};
  for (int i = 0; i < n; ++i) x.p[i] = float(i % 7 - 3), want[i / 256] += x.p[i];
  launch({1, 256}, reduce_kernel<K>, x.p, out.p, n, 2);
  return bad(out.p[0] != want[0] || out.p[1] != want[1]);
}
template <int M>
int grid(bool coop = true) {
  Buf<float> x(4 * 64), part(4 * 64, NAN), out(4 * 64);
  Buf<unsigned> st(2, 0u);
  for (int i = 0; i < 256; ++i) x.p[i] = float(i);
  int r = 0;
  for (int rep = 0; rep < 2; ++rep) {
    launch({4, 64, 0, coop}, grid_kernel<M>, x.p, part.p, out.p, st.p);
    for (int i = 0; i < 256; ++i) r |= out.p[i] != float(4 * (i % 64) + 64 * 6);
  }
  return bad(r);
}
template <int M>
int peer() {
  Buf<float> d0(128, NAN), d1(128, NAN), out(4 * 2 * 64, NAN);
  Buf<unsigned> f(2, 0u);
  cuda_host::config().deferred = true;
  for (unsigned e = 1; e <= 4; ++e) {
    cudaSetDevice(0), launch({.grid = 1, .block = 64, .early = true}, peer_kernel<M>, d0.p, d1.p, f.p,
                             f.p + 1, out.p + (e - 1) * 128, 100.f * e, e);
    cudaSetDevice(1), launch({.grid = 1, .block = 64, .early = true}, peer_kernel<M>, d1.p, d0.p, f.p + 1,
                             f.p, out.p + (e - 1) * 128 + 64, 100.f * e + 50, e);
  }
  cuda_host::run();
  int r = 0;
  for (unsigned e = 1; e <= 4; ++e)
    for (int i = 0; i < 64; ++i)
      r |= out.p[(e - 1) * 128 + i] != 100.f * e + 50 + i || out.p[(e - 1) * 128 + 64 + i] != 100.f * e + i;
  return bad(r);
}
// x -> y -> x -> y; deferred launches are one run of the engine, others are one each.
template <int M>
int early(bool deferred) {
  const How how{.grid = 2, .early = true};
  Buf<float> x(64, 1.f), y(64, NAN);
  cuda_host::config().deferred = deferred;
  launch(how, early_kernel<e_ok>, x.p, y.p);
  launch(how, early_kernel<M>, y.p, x.p);
  launch(how, early_kernel<e_ok>, x.p, y.p);
  cuda_host::run();
  int r = 0;
  for (int i = 0; i < 64; ++i) r |= y.p[i] != 4.f;
  return bad(r);
}
int copy(int extra) {
  Buf<float> x(300, 1.f), y(300, NAN);
  launch({3, 128}, copy_kernel, x.p, y.p, 300, extra);
  return bad(y.p[299] != 1.f);
}
int dyn(int extra) {
  Buf<float> y(100);
  launch({1, 128, 100 * sizeof(float)}, dyn_kernel, y.p, 100, extra);
  return bad(y.p[0] != 99.f || y.p[99] != 0.f);
}
int vec(int off) {
  Buf<float> x(68, 1.f), y(16);
  launch({1}, vec_kernel, x.p + off, y.p, 64);
  return bad(y.p[0] != 4.f);
}
int uninit() {
  Buf<float> y(32);
  launch({1}, uninit_kernel, y.p);
  return bad(!(y.p[0] == 1.f));
}
// A grid of 4 blocks waits for a kernel of another stream, on a device that has room for 2.
__global__ void waiting_kernel(unsigned* flag, float* y, unsigned polling) {
  if (threadIdx.x == 0 && blockIdx.x < polling)
    while (cuda::atomic_ref<unsigned>(*flag).load(cuda::std::memory_order_acquire) == 0) {
    }
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = 1;
}
__global__ void awaited_kernel(unsigned* flag) {
  if (threadIdx.x == 0) cuda::atomic_ref<unsigned>(*flag).store(1, cuda::std::memory_order_release);
}
int streams(unsigned polling) {
  Buf<unsigned> flag(1, 0);
  Buf<float> y(4, 0.f);
  cuda_host::config().resident = 2, cuda_host::config().deferred = true;
  launch({.grid = 4, .stream = 1}, waiting_kernel, flag.p, y.p, polling);
  launch({.grid = 1, .stream = 2}, awaited_kernel, flag.p);
  cuda_host::run();
  return bad(y.p[0] + y.p[1] + y.p[2] + y.p[3] != 4.f);
}
int smem_limit() {
  return launch({1, 128, 60000}, dyn_kernel, (float*)nullptr, 0, 0) == cudaSuccess ? 0 : 2;
}
int coop_too_large() {
  return launch({1000, 64, 0, true}, grid_kernel<g_ok>, (const float*)nullptr, (float*)nullptr,
                (float*)nullptr, (unsigned*)nullptr) == cudaSuccess
             ? 0
             : 2;
}

struct Case {
  const char* name;
  const char* noticed_by;
  int (*run)();
};
static const char kAll[] = "plain asan race";
static const Case cases[] = {
    {"ok reduce", "none", [] { return reduce<ok>(); }},
    {"ok grid barrier", "none", [] { return grid<g_ok>(); }},
    {"ok peer exchange", "none", [] { return peer<p_ok>(); }},
    {"ok copy/dyn/vec", "none", [] { return copy(0) | dyn(0) | vec(0); }},
    {"missing __syncthreads (write->read)", kAll, [] { return reduce<no_sync>(); }},
    {"missing __syncthreads (reuse, read->write)", "race", [] { return reduce<no_sync_reuse>(); }},
    {"global off-by-one", "asan", [] { return copy(1); }},
    {"dynamic shared off-by-one", "asan", [] { return dyn(1); }},
    {"static shared out of bounds", "plain asan", [] { return reduce<static_oob>(); }},
    {"uninitialised shared memory", kAll, uninit},
    {"unwritten output", kAll, [] { return copy(-1); }},
    {"misaligned float4 load", "asan", [] { return vec(1); }},
    {"shuffle in divergent branches", kAll, [] { return reduce<divergent_shfl>(); }},
    {"shuffle loop, ragged trip count", kAll, [] { return reduce<ragged_shfl>(); }},
    {"shuffle reads lane outside mask", kAll, [] { return reduce<shfl_dead_lane>(); }},
    {"caller not in mask", kAll, [] { return reduce<lane_not_in_mask>(); }},
    {"divergent __syncthreads", kAll, [] { return reduce<divergent_barrier>(); }},
    {"early return before __syncthreads", kAll, [] { return reduce<early_return>(500); }},
    {"grid barrier, launch not cooperative", kAll, [] { return grid<g_ok>(false); }},
    {"grid barrier: a block never arrives", kAll, [] { return grid<g_missing_arrival>(); }},
    {"grid barrier counter not reset", kAll, [] { return grid<g_no_reset>(); }},
    {"grid barrier: no sync before arrive", "race", [] { return grid<g_no_sync_before>(); }},
    {"grid barrier: no sync after wait", "race", [] { return grid<g_no_sync_after>(); }},
    {"grid barrier: relaxed atomics", "race", [] { return grid<g_relaxed>(); }},
    {"peer flag: device scope", "race", [] { return peer<p_device_scope>(); }},
    {"peer flag: no sync before release", "race", [] { return peer<p_no_sync>(); }},
    {"peer buffer not double-buffered", kAll, [] { return peer<p_single_buffer>(); }},
    {"ok one block waits for another stream", "none", [] { return streams(1); }},
    {"a whole grid polls for another stream", kAll, [] { return streams(4); }},
    {"ok kernels that begin early", "none", [] { return early<e_ok>(true) | early<e_ok>(false); }},
    {"begins early: never waits", kAll, [] { return early<e_no_wait>(false); }},
    {"begins early: reads before it waits", "race", [] { return early<e_late_wait>(false); }},
    {"begins early: reads before it waits, in one run", "race", [] { return early<e_late_wait>(true); }},
    {"begins early: writes before it waits", "race", [] { return early<e_early_write>(false); }},
    {"begins early: writes before it waits, in one run", "race", [] { return early<e_early_write>(true); }},
    {"peer exchange: lets the next kernel begin before it waits for the peer", kAll,
     [] { return peer<p_trigger>(); }},
    {"dynamic smem > 48K without attribute", kAll, smem_limit},
    {"cooperative grid too large", kAll, coop_too_large},
};
int main(int argc, char** argv) {
  if (argc < 2) {
    for (auto& c : cases) printf("%s: %s\n", c.noticed_by, c.name);
    return 0;
  }
  try {
    return cases[atoi(argv[1])].run();
  } catch (const std::exception& e) {
    fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
