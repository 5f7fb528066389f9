// Packets that stay on chip between the two walks of a local op, so that memory is read once.
//
// They lie in shared memory, a slot per packet. A thread reads back only what it wrote itself, so no barrier
// is needed, and neighbours' slots lie side by side, so there are no bank conflicts. The second walk must be
// the first one again.
#pragma once

#include "walk.cuh"

namespace fastvit {

template <class T, int V, int kKept>
class SmemCache {
  unsigned char* const bytes;
  int slot = 0;  // of the next packet

  template <class B>
  __device__ __forceinline__ Packet<T, B::V>* at(int operand, int j) const {
    const int index = ((slot + j) * kKept + operand) * kThreads + int(threadIdx.x);
    return reinterpret_cast<Packet<T, B::V>*>(bytes + index * int(sizeof(Packet<T, V>)));
  }

 public:
  __device__ __forceinline__ explicit SmemCache(unsigned char* bytes) : bytes(bytes) {}

  template <class B>
  __device__ __forceinline__ void put(const B&, int operand, const Packet<T, B::V> (&from)[B::U]) const {
#pragma unroll
    for (int j = 0; j < B::U; ++j) *at<B>(operand, j) = from[j];
  }
  template <class B>  // a batch, or its j-th packet alone
  __device__ __forceinline__ void get(const B&, int operand, Packet<T, B::V> (&to)[B::U], int j = 0) const {
#pragma unroll
    for (int i = 0; i < B::U; ++i) to[i] = *at<B>(operand, j + i);
  }
  template <class B>
  __device__ __forceinline__ void next(const B&) {
    slot += B::U;
  }
  __device__ __forceinline__ void rewind() { slot = 0; }
};

// What was put is read back from here on, not remembered in registers.
__device__ __forceinline__ void forget_registers() {
  asm volatile("" ::: "memory");
}

inline size_t smem_cache_bytes(const Plan& plan, int kept) {
  return size_t(plan.slots) * kept * kThreads * 16;
}

}  // namespace fastvit
