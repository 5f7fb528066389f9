// message_pack, message_merge: the messages of a collective of torch.distributed.
// Memory   reads and writes each message once. Bound by latency.
// Mapping  a thread per part; every block compares all tags, and writes numbers or NaN.
#include "../sync/message.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace fastvit {
namespace {

using message::Merging;
using message::Packing;

template <class A, class M>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Launched<Packing> launched) {
  const auto& packing = launched.begin();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < packing.width()) packing.write<A, M>(i);
}

template <class A, class M>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Launched<Merging> launched) {
  const auto& merging = launched.begin();
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < merging.ranks; rank += kThreads) differs |= !merging.fits<M>(rank);
  const bool good = !__syncthreads_or(differs);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < merging.parts()) merging.write<A, M>(i, good);
  if (!good && i == 0) tell_host(merging.report, merging.mismatch<M>());
}

}  // namespace

void CudaMessages::pack(const Packing& packing) {
  const Device device(packing.device);
  packing.call([&]<class A, class M>() {
    STD_CUDA_CHECK(launch(pack_kernel<A, M>, {ceil_div(packing.width(), kThreads), device}, packing));
  });
}

void CudaMessages::merge(const Merging& merging) {
  const Device device(merging.device);
  merging.call([&]<class A, class M>() {
    STD_CUDA_CHECK(launch(merge_kernel<A, M>, {ceil_div(merging.parts(), kThreads), device}, merging));
  });
}

}  // namespace fastvit
