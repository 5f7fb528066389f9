// Holds vectors in shared memory between the two walks of an on-chip op, so that global memory is read once.
//
// A thread reads only vectors that it wrote, so no barrier is needed. Those of neighbouring threads are
// adjacent, so there are no bank conflicts. The second walk must be equal to the first.
#pragma once

#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

template <class T, int V, int kOperands>
class SmemCache {
  unsigned char* const bytes;
  int first = 0;  // vector of the next batch

  template <class B>
  __device__ __forceinline__ Vector<T, B::V>* at(int operand, int j) const {
    const int index = ((first + j) * kOperands + operand) * kThreads + int(threadIdx.x);
    return reinterpret_cast<Vector<T, B::V>*>(bytes + index * int(sizeof(Vector<T, V>)));
  }

 public:
  __device__ __forceinline__ explicit SmemCache(unsigned char* bytes) : bytes(bytes) {}

  template <class B>
  __device__ __forceinline__ void store(const B&, int operand, const Vector<T, B::V> (&from)[B::U]) const {
#pragma unroll
    for (int j = 0; j < B::U; ++j) *at<B>(operand, j) = from[j];
  }
  template <class B>  // a batch, or its j-th vector alone
  __device__ __forceinline__ void load(const B&, int operand, Vector<T, B::V> (&to)[B::U], int j = 0) const {
#pragma unroll
    for (int i = 0; i < B::U; ++i) to[i] = *at<B>(operand, j + i);
  }
  template <class B>
  __device__ __forceinline__ void advance(const B&) {
    first += B::U;
  }
  __device__ __forceinline__ void rewind() { first = 0; }
};

// Forces later reads to come from shared memory, not from registers.
__device__ __forceinline__ void force_reload_from_shared() {
  asm volatile("" ::: "memory");
}

inline size_t smem_cache_bytes(const LaunchPlan& plan, int operands) {
  return size_t(plan.vectors_in_shared) * operands * kThreads * 16;
}

// As dispatch_kernel_of_plan, for a plan with vectors in shared memory.
template <class T, class F>
void dispatch_vector_kernel(const LaunchPlan& plan, const F& f) {
  plan.is_rows ? f.template operator()<true, kVectorWidth<T>>()
               : f.template operator()<false, kVectorWidth<T>>();
}

// Launches an on-chip op; false where its blocks cannot all be resident at once, which slices need.
template <class Params>
bool try_single_launch(void (*kernel)(KernelParams<Params>), const LaunchPlan& plan, int cached_operands,
                       const LaunchContext& context, const Params& params) {
  cached_query(reinterpret_cast<const void*>(kernel), context.device_index, [&](int&) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(context.limits.smem_cache_bytes));
  });
  const LaunchConfig config{plan.blocks(), context, smem_cache_bytes(plan, cached_operands), plan.slices > 1};
  const cudaError_t status = launch(kernel, config, params);
  if (status == cudaErrorCooperativeLaunchTooLarge || status == cudaErrorNotSupported) {
    (void)cudaGetLastError();  // an empty device has no room for all blocks; then the op takes two launches
    return false;
  }
  STD_CUDA_CHECK(status);
  return true;
}

}  // namespace fastvit
