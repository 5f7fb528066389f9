// Access to parameters and buffers of C numbers in any floating-point dtype.
#pragma once

#include "../dtypes.h"
#include "vector_io.cuh"

namespace fastvit {

template <class A>
__device__ __forceinline__ A load_channel(const ChannelVector& from, int64_t c, A absent) {
  if (!from.data) return absent;
  return dispatch_storage_type(
      from.dtype, [&]<class S>() { return A(Accumulation<S>(static_cast<const S*>(from.data)[c])); });
}

__device__ __forceinline__ void store_channel(const ChannelVector& to, int64_t c, double value) {
  dispatch_storage_type(to.dtype,
                        [&]<class S>() { static_cast<S*>(to.data)[c] = S(Accumulation<S>(value)); });
}

// V numbers from a multiple of V on: one switch, and wide loads where the memory is aligned for them.
template <int V, class A>
__device__ __forceinline__ void load_channels(const ChannelVector& from, int64_t c, A (&to)[V], A absent) {
  if (!from.data) {
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = absent;
    return;
  }
  dispatch_storage_type(from.dtype, [&]<class S>() {
    const S* const at = static_cast<const S*>(from.data) + c;
    constexpr int kWide = V < kVectorWidth<S> ? V : kVectorWidth<S>;
    if constexpr (kWide * sizeof(S) >= 8) {
      if (reinterpret_cast<uintptr_t>(from.data) % 16 == 0) {
#pragma unroll
        for (int first = 0; first < V; first += kWide) {
          Vector<S, kWide> vector;
          vector.load(at + first);
#pragma unroll
          for (int k = 0; k < kWide; ++k) to[first + k] = A(Accumulation<S>(vector.element[k]));
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = A(Accumulation<S>(at[k]));
  });
}

}  // namespace fastvit
