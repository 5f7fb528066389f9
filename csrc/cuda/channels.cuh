// Parameters and buffers of C numbers in any floating-point dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../arguments.h"
#include "vector_io.cuh"

namespace fastvit {

enum class Storage : int { half, bfloat16, single, twice };

struct ChannelArray {  // C numbers, or null
  void* data;
  Storage storage;

  template <class A>
  __device__ __forceinline__ A read(int64_t c, A absent) const {
    if (!data) return absent;
    switch (storage) {
      case Storage::half:
        return A(float(static_cast<const __half*>(data)[c]));
      case Storage::bfloat16:
        return A(float(static_cast<const __nv_bfloat16*>(data)[c]));
      case Storage::single:
        return A(static_cast<const float*>(data)[c]);
      default:
        return A(static_cast<const double*>(data)[c]);
    }
  }
  // V numbers from a multiple of V on: one switch, and wide loads where the memory is aligned for them.
  template <int V, class A>
  __device__ __forceinline__ void read(int64_t c, A (&to)[V], A absent) const {
    if (!data) {
#pragma unroll
      for (int k = 0; k < V; ++k) to[k] = absent;
      return;
    }
    switch (storage) {
      case Storage::half:
        return read_as<__half>(c, to);
      case Storage::bfloat16:
        return read_as<__nv_bfloat16>(c, to);
      case Storage::single:
        return read_as<float>(c, to);
      default:
        return read_as<double>(c, to);
    }
  }
  __device__ __forceinline__ void write(int64_t c, double value) const {
    switch (storage) {
      case Storage::half:
        static_cast<__half*>(data)[c] = __half(float(value));
        return;
      case Storage::bfloat16:
        static_cast<__nv_bfloat16*>(data)[c] = __nv_bfloat16(float(value));
        return;
      case Storage::single:
        static_cast<float*>(data)[c] = float(value);
        return;
      default:
        static_cast<double*>(data)[c] = value;
    }
  }

 private:
  template <class S, int V, class A>
  __device__ __forceinline__ void read_as(int64_t c, A (&to)[V]) const {
    const S* const from = static_cast<const S*>(data) + c;
    constexpr int kWide = V < kVector<S> ? V : kVector<S>;
    if constexpr (kWide * sizeof(S) >= 8) {
      if (reinterpret_cast<uintptr_t>(data) % 16 == 0) {
#pragma unroll
        for (int first = 0; first < V; first += kWide) {
          Vector<S, kWide> vector;
          vector.load(from + first);
#pragma unroll
          for (int k = 0; k < kWide; ++k) to[first + k] = A(Accumulation<S>(vector.at[k]));
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = A(Accumulation<S>(from[k]));
  }
};

inline ChannelArray per_channel(const Channels& t) {
  switch (t.dtype) {
    case ScalarType::Half:
      return {t.data, Storage::half};
    case ScalarType::BFloat16:
      return {t.data, Storage::bfloat16};
    case ScalarType::Double:
      return {t.data, Storage::twice};
    default:
      return {t.data, Storage::single};
  }
}

}  // namespace fastvit
