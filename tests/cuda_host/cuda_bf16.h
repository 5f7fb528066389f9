// Test-only __nv_bfloat16: storage + round-to-nearest-even conversions.
#pragma once
#include "cuda_runtime.h"
struct __nv_bfloat16 {
  unsigned short raw;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float f) {
    unsigned u = std::bit_cast<unsigned>(f);
    raw = f != f ? 0x7fff : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(unsigned(raw) << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__nv_bfloat16(a), __nv_bfloat16(b)};
}
