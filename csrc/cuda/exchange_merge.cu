// exchange_share: exchanges moments or sums that an op without `exchange` has computed.
// Memory   writes and reads 16 bytes per two floats and rank. Bound by latency.
// Mapping  one block, a thread per pair; it sends, then waits.
#include "exchange.cuh"

#include "../sync/exchange_descriptor.h"
#include "launch.cuh"
#include "exchange_ops.h"

namespace fastvit {
namespace {

template <class A>
struct ShareParams {
  Exchange peers;
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
  const Push<A> push(args.peers);
  for (int64_t c = threadIdx.x; c < C; c += kThreads) {
    const A first = args.numbers[c], second = args.numbers[C + c];
    push.pair(c, first, second);
    if (!args.moments) args.result[c] = first, args.result[C + c] = second;
  }
  const Part all{0, int(C)};
  if (args.moments) {
    push.header(C, load_count(args.numbers + 2 * C));
    end_moments(args.peers, all, args.result, C);
  } else {
    push.header();
    end_sums(args.peers, all, args.result + 2 * C, C);
  }
}

}  // namespace

Tensor cuda_exchange_share(Tensor numbers, Tensor fields) {
  peer::check_numbers("exchange_share", numbers);
  const peer::Kind kind = peer::kind_of(numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  const Exchange exchange = peer::exchange_of("exchange_share", fields, n, numbers.scalar_type(), kind);
  const bool moments = kind == peer::kMoments;
  Tensor result = peer::shared_result(numbers);
  const Device device(numbers.get_device_index());
  dispatch_accumulation(numbers.scalar_type(), [&]<class A>() {
    const ShareParams<A> params{exchange, static_cast<const A*>(numbers.data_ptr()),
                                static_cast<A*>(result.data_ptr()), n / 2 - moments, moments};
    STD_CUDA_CHECK(launch(share_kernel<A>, {1, device}, params));
  });
  return result;
}

}  // namespace fastvit
