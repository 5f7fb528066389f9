// Vector<T, V>: V elements of type T that one load or store moves between global memory and registers. A
// Vector is one element, 16 bytes, or 8 bytes: where a kernel's tensors have elements of two sizes, all
// vectors have as many elements as 16 bytes hold of the larger. The file also has fma_rn and add_rn,
// arithmetic that the compiler does not change.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../dtypes.h"
#include "ptx.cuh"

namespace fastvit {

// Calls f.template operator()<T>() with the storage type T of a dtype.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class F>
FASTVIT_HOST_DEVICE auto dispatch_storage_type(ScalarType dtype, const F& f) {
  return dispatch_storage_type<__half, __nv_bfloat16>(dtype, f);
}

// fma_rn is a * b + c, rounded once. add_rn is a + b, never fused with a product. Several kernels must give
// the same bits; with these functions the compiler cannot fuse an operation in one kernel and leave it
// unfused in another.
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
constexpr int kVectorWidth = 16 / int(sizeof(T));  // elements of a vector of 16 bytes

// Writes a and b to pair[0] and pair[1]. It rounds to a 16-bit type to nearest, from sm_80 on with one
// instruction for both.
__device__ __forceinline__ void round_pair(float a, float b, float* pair) {
  pair[0] = a, pair[1] = b;
}
__device__ __forceinline__ void round_pair(double a, double b, double* pair) {
  pair[0] = a, pair[1] = b;
}
__device__ __forceinline__ void round_pair(float a, float b, __half* pair) {
  *reinterpret_cast<__half2*>(pair) = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void round_pair(float a, float b, __nv_bfloat16* pair) {
  *reinterpret_cast<__nv_bfloat162*>(pair) = __floats2bfloat162_rn(a, b);
}

template <class T, int V>
struct __align__(sizeof(T) * V) Vector {
  using A = Accumulation<T>;                                            // the type of arithmetic
  using Words = std::conditional_t<sizeof(T) * V == 16, uint4, uint2>;  // what one instruction moves; V > 1
  T element[V];

  // Converts the elements to the type of arithmetic. A bfloat16 is the upper half of a float.
  __device__ __forceinline__ void unpack(A (&out)[V]) const {
    if constexpr (V > 1 && std::is_same_v<T, __nv_bfloat16>) {
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
  // Sets the elements to the numbers, rounded to the elements' type.
  __device__ __forceinline__ void pack(const A (&in)[V]) {
    if constexpr (V == 1) {
      element[0] = T(in[0]);
    } else {
#pragma unroll
      for (int k = 0; k < V; k += 2) round_pair(in[k], in[k + 1], element + k);
    }
  }

  // Load from and store to global memory, which is aligned to the size of the vector.
  template <CacheHint kHint = kNoCacheHint>
  __device__ __forceinline__ void load(const T* source) {
    if constexpr (V == 1)
      element[0] = *source;
    else
      *reinterpret_cast<Words*>(element) = load_wide<kHint>(reinterpret_cast<const Words*>(source));
  }
  __device__ __forceinline__ void store(T* destination) const {
    if constexpr (V == 1)
      *destination = element[0];
    else
      store_wide(reinterpret_cast<Words*>(destination), *reinterpret_cast<const Words*>(element));
  }
  // Sets all elements to zero.
  __device__ __forceinline__ void clear() {
    if constexpr (V == 1)
      element[0] = T(0.f);
    else
      *reinterpret_cast<Words*>(element) = Words{};
  }
};

}  // namespace fastvit
