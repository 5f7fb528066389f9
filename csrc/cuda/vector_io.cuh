// Elements in memory and in registers: a Vector is one element, or what one load or store moves: 16 bytes, or
// 8 where elements of 16 bits go beside those of 32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../dtypes.h"
#include "ptx.cuh"

namespace fastvit {

// f.template operator()<T>() for a dtype.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
FASTVIT_HOST_DEVICE auto dispatch_storage_type(ScalarType dtype, const F& f) {
  return dispatch_storage_type<__half, __nv_bfloat16>(dtype, f);
}

// a * b + c rounded once, and a + b that is never fused with a product. Used where several kernels must give
// the same bits, so that the compiler does not fuse in one kernel and not in another.
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fma_rn(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
__device__ __forceinline__ float add_rn(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ __forceinline__ double add_rn(double a, double b) {
  return __dadd_rn(a, b);
}

template <class T>
constexpr int kVectorWidth = 16 / int(sizeof(T));

// Two numbers, rounded to nearest: the 16-bit types round_pair pairs with one instruction.
__device__ __forceinline__ void round_pair(float a, float b, float* to) {
  to[0] = a, to[1] = b;
}
__device__ __forceinline__ void round_pair(double a, double b, double* to) {
  to[0] = a, to[1] = b;
}
__device__ __forceinline__ void round_pair(float a, float b, __half* to) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void round_pair(float a, float b, __nv_bfloat16* to) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

template <class T, int V>
struct __align__(sizeof(T) * V) Vector {
  using A = Accumulation<T>;
  using Words = std::conditional_t<sizeof(T) * V == 16, uint4, uint2>;
  T element[V];

  __device__ __forceinline__ void unpack(A (&out)[V]) const {
    if constexpr (V > 1 && std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float
      const unsigned* const words = reinterpret_cast<const unsigned*>(element);
#pragma unroll
      for (int k = 0; k < V; k += 2) {
        out[k] = __uint_as_float(words[k / 2] << 16);
        out[k + 1] = __uint_as_float(words[k / 2] & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) out[k] = A(element[k]);
    }
  }
  __device__ __forceinline__ void pack(const A (&in)[V]) {
    if constexpr (V == 1) {
      element[0] = T(in[0]);
    } else {
#pragma unroll
      for (int k = 0; k < V; k += 2) round_pair(in[k], in[k + 1], element + k);
    }
  }

  // Global memory.
  template <CacheHint kHint = kNoHint>
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (V == 1)
      element[0] = *p;
    else
      *reinterpret_cast<Words*>(element) = load_wide<kHint>(reinterpret_cast<const Words*>(p));
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (V == 1)
      *p = element[0];
    else
      store_wide(reinterpret_cast<Words*>(p), *reinterpret_cast<const Words*>(element));
  }
  __device__ __forceinline__ void clear() {
    if constexpr (V == 1)
      element[0] = T(0.f);
    else
      *reinterpret_cast<Words*>(element) = Words{};
  }
};

}  // namespace fastvit
