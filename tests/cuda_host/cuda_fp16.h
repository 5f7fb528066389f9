// Test-only __half: storage + conversions only (kernels compute in float). Needs _Float16 (GCC 12+, SSE2).
#pragma once
#include "cuda_runtime.h"
struct __half {
  unsigned short raw;
  __half() = default;
  explicit __half(float f) {
    _Float16 h = (_Float16)f;
    std::memcpy(&raw, &h, 2);
  }
  operator float() const {
    _Float16 h;
    std::memcpy(&h, &raw, 2);
    return float(h);
  }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float a, float b) {
  return {__half(a), __half(b)};
}
