// What kernels call without including anything: indices, barriers, warp operations, atomics, intrinsics. Part
// of cuda_runtime.h.
#pragma once
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline void __syncthreads(CUDA_HOST_AT) {
  cuda_host::block_barrier(cuda_host::Op::barrier, 0, CUDA_HOST_LOC);
}
inline int __syncthreads_or(int p, CUDA_HOST_AT) {
  return cuda_host::block_barrier(cuda_host::Op::barrier_or, p, CUDA_HOST_LOC);
}
namespace cuda_host {
template <class T>
T shfl(unsigned m, T v, int src, Loc at) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "CUDA shuffles 4- and 8-byte scalars");
  uint64_t r = shuffle(m, bits(v), src, at);
  std::memcpy(&v, &r, sizeof v);
  return v;
}
}  // namespace cuda_host
template <class T>
T __shfl_xor_sync(unsigned m, T v, int x, CUDA_HOST_AT) {
  return cuda_host::shfl(m, v, int(cuda_host::lane()) ^ x, CUDA_HOST_LOC);
}
inline unsigned atomicInc(unsigned* p, unsigned most, CUDA_HOST_AT) {
  return cuda_host::rmw(p, [=](unsigned o) { return o >= most ? 0 : o + 1; }, CUDA_HOST_LOC);
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> v, CUDA_HOST_AT) {
  return cuda_host::rmw(p, [=](T) { return T(v); }, CUDA_HOST_LOC);
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> c, std::common_type_t<T> v, CUDA_HOST_AT) {
  return cuda_host::rmw(p, [=](T o) { return o == c ? T(v) : o; }, CUDA_HOST_LOC);
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline double __fma_rn(double a, double b, double c) {
  return std::fma(a, b, c);
}
// The compiler does not look through `asm`, so it cannot fuse the sum with a product.
#ifdef __FMA__
#define CUDA_HOST_UNFUSED(a, b) asm("" : "+x"(a), "+x"(b))
#else
#define CUDA_HOST_UNFUSED(a, b)
#endif
inline float __fadd_rn(float a, float b) {
  CUDA_HOST_UNFUSED(a, b);
  return a + b;
}
inline double __dadd_rn(double a, double b) {
  CUDA_HOST_UNFUSED(a, b);
  return a + b;
}
inline float __uint_as_float(unsigned v) {
  return std::bit_cast<float>(v);
}
#define CUDA_HOST_MINMAX(T) \
  inline T min(T a, T b) {  \
    return b < a ? b : a;   \
  }                         \
  inline T max(T a, T b) {  \
    return a < b ? b : a;   \
  }
CUDA_HOST_MINMAX(int)
CUDA_HOST_MINMAX(unsigned)
CUDA_HOST_MINMAX(long)
CUDA_HOST_MINMAX(float)
CUDA_HOST_MINMAX(double)
