// FASTVIT_INLINE: a function that runs on the host and, under nvcc, on the device too.
#pragma once

#if defined(__CUDACC__)
#define FASTVIT_INLINE __host__ __device__ __forceinline__
#else
#define FASTVIT_INLINE inline __attribute__((always_inline))
#endif
