// message_pack, message_unpack: what a collective of torch.distributed carries.
// Memory   reads and writes each message once. Bound by latency.
// Mapping  a thread per number; every block looks at all tags, so that it writes numbers or NaN.
#include "message.h"

#include "host.h"
#include "report.cuh"

namespace fastvit {
namespace {

using message::Packing;
using message::Unpacking;

template <class A, class M>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Packing packing) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < packing.size()) packing.write<A, M>(i);
}

template <class A, class M>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ Unpacking unpacking) {
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < unpacking.ranks(); rank += kThreads)
    differs |= !unpacking.fits<M>(rank);
  const bool good = !__syncthreads_or(differs);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < unpacking.rows * unpacking.n) unpacking.write<A, M>(i, good);
  if (!good && i == 0) tell_host(unpacking.report, unpacking.mismatch<M>());
}

}  // namespace

void CudaMessages::pack(const Packing& packing) {
  const Device device(packing.kinds.device);
  packing.kinds.call([&]<class A, class M>() {
    STD_CUDA_CHECK(launch(pack_kernel<A, M>, {ceil_div(packing.size(), kThreads), device.stream}, packing));
  });
}

void CudaMessages::unpack(const Unpacking& unpacking) {
  const Device device(unpacking.kinds.device);
  const int64_t numbers = std::max<int64_t>(unpacking.rows * unpacking.n, 1);
  unpacking.kinds.call([&]<class A, class M>() {
    STD_CUDA_CHECK(launch(unpack_kernel<A, M>, {ceil_div(numbers, kThreads), device.stream}, unpacking));
  });
}

}  // namespace fastvit
