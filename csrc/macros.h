// FASTVIT_INLINE: a function that runs on the host and, under nvcc, on the device too.
// exp_, expm1_, log1p_: for a float, a double and, on the host, for each lane of a vector of them.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define FASTVIT_INLINE __host__ __device__ __forceinline__
#else
#define FASTVIT_INLINE inline __attribute__((always_inline))
#endif

#define FASTVIT_MATH(name, float_name, double_name)                                     \
  namespace fastvit {                                                                   \
  FASTVIT_INLINE float name(float v) {                                                  \
    return float_name(v);                                                               \
  }                                                                                     \
  FASTVIT_INLINE double name(double v) {                                                \
    return double_name(v);                                                              \
  }                                                                                     \
  template <class V, class = decltype(V{}[0])>                                          \
  FASTVIT_INLINE V name(V v) {                                                          \
    for (unsigned i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = fastvit::name(v[i]); \
    return v;                                                                           \
  }                                                                                     \
  }

FASTVIT_MATH(exp_, expf, exp)
FASTVIT_MATH(expm1_, expm1f, expm1)
FASTVIT_MATH(log1p_, log1pf, log1p)
#undef FASTVIT_MATH
