// Access to a ChannelVector: a parameter or buffer of C numbers, such as weight or running_mean, in any
// floating-point dtype. A parameter that the layer does not have is null. A 16-bit number is converted to
// double by way of its accumulation type, float: CUDA has no direct conversion.
#pragma once

#include "../dtypes.h"
#include "vector_io.cuh"

namespace fastvit {

// Returns the value of channel c, or `default_value` if the vector is null.
template <class A>
__device__ __forceinline__ A load_channel(const ChannelVector& source, int64_t c, A default_value) {
  if (!source.data) return default_value;
  return dispatch_storage_type(
      source.dtype, [&]<class T>() { return A(Accumulation<T>(static_cast<const T*>(source.data)[c])); });
}

// Rounds the value and writes it to channel c. The vector must not be null.
__device__ __forceinline__ void store_channel(const ChannelVector& destination, int64_t c, double value) {
  dispatch_storage_type(destination.dtype,
                        [&]<class T>() { static_cast<T*>(destination.data)[c] = T(Accumulation<T>(value)); });
}

// Loads the V numbers from channel c on, where c is a multiple of V. Faster than V calls of load_channel:
// there is one switch over the dtype, and loads have 8 or 16 bytes, if there are 8 and the vector is aligned.
template <int V, class A>
__device__ __forceinline__ void load_channels(const ChannelVector& source, int64_t c, A (&values)[V],
                                              A default_value) {
  if (!source.data) {
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = default_value;
    return;
  }
  dispatch_storage_type(source.dtype, [&]<class T>() {
    const T* const data = static_cast<const T*>(source.data) + c;
    constexpr int kWidth = V < kVectorWidth<T> ? V : kVectorWidth<T>;  // numbers of one wide load
    if constexpr (kWidth * sizeof(T) >= 8) {
      if (reinterpret_cast<uintptr_t>(source.data) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += kWidth) {
          Vector<T, kWidth> vector;
          vector.load(data + i);
#pragma unroll
          for (int k = 0; k < kWidth; ++k) values[i + k] = A(Accumulation<T>(vector.element[k]));
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = A(Accumulation<T>(data[k]));
  });
}

}  // namespace fastvit
