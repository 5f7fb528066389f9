// FASTVIT_HOST_DEVICE marks an inlined function that runs on the host and, under nvcc, on the device too.
// FASTVIT_FORCE_INLINE marks a function that runs on the host only, and is always inlined;
// FASTVIT_FORCE_INLINE_LAMBDA marks a lambda.
#pragma once

#define FASTVIT_FORCE_INLINE inline __attribute__((always_inline))
#define FASTVIT_FORCE_INLINE_LAMBDA __attribute__((always_inline))  // after a lambda's parameters

#if defined(__CUDACC__)
#define FASTVIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTVIT_HOST_DEVICE FASTVIT_FORCE_INLINE
#endif
