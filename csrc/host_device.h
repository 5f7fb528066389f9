// FASTVIT_HOST_DEVICE marks an inlined function that runs on the host and, under nvcc, on the device too.
#pragma once

#if defined(__CUDACC__)
#define FASTVIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTVIT_HOST_DEVICE inline __attribute__((always_inline))
#endif
