// Parameters and buffers of C numbers in any floating-point dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../moments.h"
#include "launch.cuh"

namespace fastvit {

enum class Storage : int { half, bfloat16, single, twice };

struct ChannelArray {  // C numbers, or null
  void* data;
  Storage storage;

  __device__ __forceinline__ double read(int64_t c, double absent) const {
    if (!data) return absent;
    switch (storage) {
      case Storage::half:
        return double(float(static_cast<const __half*>(data)[c]));
      case Storage::bfloat16:
        return double(float(static_cast<const __nv_bfloat16*>(data)[c]));
      case Storage::single:
        return double(static_cast<const float*>(data)[c]);
      default:
        return static_cast<const double*>(data)[c];
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
};

}  // namespace fastvit
