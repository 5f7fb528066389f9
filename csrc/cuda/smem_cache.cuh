// A single launch is one kernel for the statistics and the op. The kernel walks its data twice; SmemCache
// keeps the vectors in shared memory in between, so that global memory is read once. try_single_launch
// launches such a kernel.
//
// A thread reads only vectors that it wrote, so no barrier is needed. Vectors of neighboring threads are
// adjacent, so whole vectors have no bank conflicts. The second walk must have the batches of the first, in
// the same order.
#pragma once

#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

// T: storage type. V: elements of a vector. kOperands: number of tensors of which vectors are kept; they are
// numbered from 0 on. B: the type of a batch, the vectors that a thread loads together. An unnamed parameter
// only tells B.
template <class T, int V, int kOperands>
class SmemCache {
  unsigned char* const bytes;
  int first_vector = 0;  // number of vectors of each operand before the current batch

  // The place of the j-th vector of the current batch. A single element has the place of a whole vector.
  template <class B>
  __device__ __forceinline__ Vector<T, B::V>* address(int operand, int j) const {
    const int index = ((first_vector + j) * kOperands + operand) * kThreads + int(threadIdx.x);
    return reinterpret_cast<Vector<T, B::V>*>(bytes + index * int(sizeof(Vector<T, V>)));
  }

 public:
  __device__ __forceinline__ explicit SmemCache(unsigned char* bytes) : bytes(bytes) {}

  template <class B>
  __device__ __forceinline__ void store(const B&, int operand, const Vector<T, B::V> (&vectors)[B::U]) const {
#pragma unroll
    for (int j = 0; j < B::U; ++j) *address<B>(operand, j) = vectors[j];
  }
  // Loads a whole batch, or the j-th vector of the current batch if B is a batch of one vector.
  template <class B>
  __device__ __forceinline__ void load(const B&, int operand, Vector<T, B::V> (&vectors)[B::U],
                                       int j = 0) const {
#pragma unroll
    for (int i = 0; i < B::U; ++i) vectors[i] = *address<B>(operand, j + i);
  }
  // Makes the batch after this one the current batch.
  template <class B>
  __device__ __forceinline__ void advance(const B&) {
    first_vector += B::U;
  }
  // Makes the first batch the current batch, for the second walk.
  __device__ __forceinline__ void rewind() { first_vector = 0; }
};

// Makes the compiler read stored vectors back from shared memory, instead of keeping them in registers.
__device__ __forceinline__ void force_reload_from_shared() {
  asm volatile("" ::: "memory");
}

// Returns the bytes of shared memory in which a block of a single launch keeps its `operands` tensors.
inline size_t required_cache_bytes(const LaunchPlan& plan, int operands) {
  return size_t(plan.vectors_in_shared) * operands * kThreads * 16;
}

// Calls f.template operator()<kIsRows, V>() with a kernel's template parameters, for the plan of a single
// launch. Such a plan always has vectors of 16 bytes.
template <class T, class F>
void dispatch_vector_kernel(const LaunchPlan& plan, const F& f) {
  plan.is_rows ? f.template operator()<true, kVectorWidth<T>>()
               : f.template operator()<false, kVectorWidth<T>>();
}

// Launches a kernel that keeps `cached_operands` tensors in shared memory. If tiles have several slices,
// whose blocks wait for each other, all blocks must be resident at the same time. Returns false if they
// cannot be, or if the device does not support that.
template <class Params>
bool try_single_launch(void (*kernel)(KernelParams<Params>), const LaunchPlan& plan, int cached_operands,
                       const LaunchContext& context, const Params& params) {
  // This query only sets an attribute. cached_query does so once per host thread, kernel and device.
  cached_query(reinterpret_cast<const void*>(kernel), context.device_index, [&](int&) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(context.limits.smem_cache_bytes));
  });
  const LaunchConfig config{.blocks = plan.blocks(),
                            .context = context,
                            .shared_bytes = required_cache_bytes(plan, cached_operands),
                            .cooperative = plan.slices > 1};
  const cudaError_t status = launch(kernel, config, params);
  if (status == cudaErrorCooperativeLaunchTooLarge || status == cudaErrorNotSupported) {
    (void)cudaGetLastError();  // clears the error: the caller launches two kernels instead
    return false;
  }
  STD_CUDA_CHECK(status);
  return true;
}

}  // namespace fastvit
