// Launchers' helpers: choice of a kernel's template, launches of local ops, arguments of the kernels.
#pragma once

#include "../sync/cuda_peer.cuh"
#include "backend.h"
#include "channels.cuh"
#include "device.h"
#include "gradient.cuh"
#include "normalise.cuh"
#include "scratch.h"
#include "smem_cache.cuh"
#include "vector_io.cuh"

namespace fastvit {

// f(Shares<...>) with or without an exchange.
template <class F>
void with_shares(const Exchange* exchange, const F& f) {
  exchange ? f(Shares<true>{*exchange}) : f(Shares<false>{});
}

inline ChannelArray per_channel(const Channels& t) {
  switch (t.dtype) {
    case ScalarType::Half:
      return {t.data, Storage::half};
    case ScalarType::BFloat16:
      return {t.data, Storage::bfloat16};
    case ScalarType::Double:
      return {t.data, Storage::twice};
    default:
      return {t.data, Storage::single};
  }
}

// f.template operator()<T>() for the activations' type.
template <class F>
void with_type(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Half:
      return f.template operator()<__half>();
    case ScalarType::BFloat16:
      return f.template operator()<__nv_bfloat16>();
    case ScalarType::Double:
      return f.template operator()<double>();
    default:
      return f.template operator()<float>();
  }
}

// f.template operator()<kRows, V>() for a plan.
template <class T, class F>
void with_walk(const Plan& plan, const F& f) {
  if (plan.rows)
    plan.vector ? f.template operator()<true, kVector<T>>() : f.template operator()<true, 1>();
  else
    plan.vector ? f.template operator()<false, kVector<T>>() : f.template operator()<false, 1>();
}

// The same, for a plan with packets in shared memory.
template <class T, class F>
void with_vector_walk(const Plan& plan, const F& f) {
  plan.rows ? f.template operator()<true, kVector<T>>() : f.template operator()<false, kVector<T>>();
}

// Blocks of a kernel that fit on a multiprocessor, without dynamic shared memory.
inline int blocks_of(const Device& device, const void* kernel) {
  return asked_once(kernel, device.current, [&](int& value) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, kThreads, 0);
  });
}

// For Planner::make: the blocks per multiprocessor of kernel_of<kRows, V>(), the kernel of a plan. No other
// kernel is asked about, since that loads it, which may wait for the GPU and so for peers.
template <class T, class KernelOf>
auto resident_blocks(const Device& device, const KernelOf& kernel_of) {
  return [&](const Plan& plan) {
    int blocks = 0;
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      blocks = blocks_of(device, reinterpret_cast<const void*>(kernel_of.template operator()<kRows, V>()));
    });
    return blocks;
  };
}

// Launches a local op; false where its blocks cannot all be resident at once, which slices need.
template <auto kKernel, class Args>
bool launch_on_chip(const Plan& plan, int cached, const Device& device, const Args& args) {
  asked_once(nullptr, device.current, [&](int&) {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(device.limits.smem_cache_bytes));
  });
  const Launch how{plan.blocks(), device.stream, smem_cache_bytes(plan, cached), plan.slices > 1};
  const cudaError_t status = launch(kKernel, how, args);
  if (status == cudaErrorCooperativeLaunchTooLarge) {
    (void)cudaGetLastError();  // an empty device has too few places; then the op takes two launches
    return false;
  }
  STD_CUDA_CHECK(status);
  return true;
}

// The statistics' part of a forward kernel's arguments.
template <class A>
RunningStats<A> running_stats_of(const ForwardArgs& args) {
  return {args.layout.C,
          per_channel(args.running_mean),
          per_channel(args.running_var),
          args.num_batches_tracked,
          args.cumulative,
          args.momentum,
          A(args.eps),
          static_cast<A*>(args.saved)};
}

template <class T>
Activated<T> activated_of(const ForwardArgs& args) {
  using A = Accumulation<T>;
  return {per_channel(args.weight), per_channel(args.bias), gamma_floor<A>(args.in_place, args.dtype),
          args.activation, A(args.activation_param)};
}

// The saved values of a backward kernel, from ReduceArgs or BackwardArgs.
template <class A, class Args>
Saved<A> saved_of(const Args& args) {
  return {args.layout.C,           static_cast<const A*>(args.saved),         per_channel(args.weight),
          per_channel(args.bias),  gamma_floor<A>(args.in_place, args.dtype), args.activation,
          A(args.activation_param)};
}

// f.template operator()<kSource>() for the saved operands.
template <class Args, class F>
void with_source(const Args& args, const F& f) {
  if (args.in_place)
    f.template operator()<Source::output>();
  else if (args.z)
    f.template operator()<Source::input_and_residual>();
  else
    f.template operator()<Source::input>();
}

}  // namespace fastvit
