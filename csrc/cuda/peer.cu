// peer_share: an exchange of moments or sums that were formed before.
// Memory   writes and reads 16 bytes per two floats and rank. Bound by latency.
// Mapping  one block, a thread per pair; it sends, then waits.
#include "peer.cuh"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../sync/handle.h"
#include "launch.cuh"
#include "peer.h"

namespace fastvit {
namespace {

template <class A>
struct ShareParams {
  Exchange exchange;
  const A* numbers;
  A* result;  // moments [2C + 2], or sums [2][2C]
  int64_t C;
  bool moments;
};

template <class A>
__global__ void __launch_bounds__(kThreads)
    share_kernel(const __grid_constant__ Launched<ShareParams<A>> launched) {
  const auto& args = launched.begin();
  const int64_t C = args.C;
  const Push<A> push(args.exchange);
  for (int64_t c = threadIdx.x; c < C; c += kThreads) {
    const A first = args.numbers[c], second = args.numbers[C + c];
    push.pair(c, first, second);
    if (!args.moments) args.result[c] = first, args.result[C + c] = second;
  }
  const Part all{0, int(C)};
  if (args.moments) {
    push.header(C, load_count(args.numbers + 2 * C));
    end_moments(args.exchange, all, args.result, C);
  } else {
    push.header();
    end_sums(args.exchange, all, args.result + 2 * C, C);
  }
}

}  // namespace

Tensor cuda_peer_share(Tensor numbers, Tensor fields) {
  peer::check_numbers("peer_share", numbers);
  const peer::Kind kind = peer::kind_of(numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  const Exchange exchange = peer::exchange_of("peer_share", fields, n, numbers.scalar_type(), kind);
  const bool moments = kind == peer::kMoments;
  Tensor result =
      moments ? torch::stable::new_empty(numbers, {n}) : torch::stable::new_empty(numbers, {2, n});
  const Device device(numbers.get_device_index());
  const auto run = [&]<class A>(const A* own) {
    const ShareParams<A> kernel{exchange, own, static_cast<A*>(result.data_ptr()), n / 2 - moments, moments};
    STD_CUDA_CHECK(launch(share_kernel<A>, {1, device}, kernel));
  };
  peer::is_double(numbers) ? run(static_cast<const double*>(numbers.data_ptr()))
                           : run(static_cast<const float*>(numbers.data_ptr()));
  return result;
}

}  // namespace fastvit
