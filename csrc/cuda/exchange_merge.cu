// exchange_merge: exchanges moments or sums that an op without `exchange` has computed.
// Memory   writes and reads 16 bytes per two floats and rank. Bound by latency.
// Mapping  one block, a thread per pair; it sends, then waits.
#include "exchange.cuh"

#include "../sync/exchange_descriptor.h"
#include "exchange_ops.h"
#include "launch.cuh"

namespace fastvit {
namespace {

template <class A>
struct ExchangeMergeParams {
  Exchange group_exchange;
  const A* numbers;
  A* result;  // moments [2C + 2], or sums [2][2C]
  int64_t C;
  bool moments;
};

template <class A>
__global__ void __launch_bounds__(kThreads)
    exchange_merge_kernel(const __grid_constant__ KernelParams<ExchangeMergeParams<A>> kernel_params) {
  const auto& args = kernel_params.wait_and_get();
  const int64_t C = args.C;
  const MessageSender<A> push(args.group_exchange);
  for (int64_t c = threadIdx.x; c < C; c += kThreads) {
    const A first = args.numbers[c], second = args.numbers[C + c];
    push.pair(c, first, second);
    if (!args.moments) args.result[c] = first, args.result[C + c] = second;
  }
  const ChannelRange all{0, int(C)};
  if (args.moments) {
    push.header(C, unpack_count(args.numbers + 2 * C));
    receive_moments(args.group_exchange, all, args.result, C);
  } else {
    push.header();
    receive_sums(args.group_exchange, all, args.result + 2 * C, C);
  }
}

}  // namespace

Tensor cuda_exchange_merge(Tensor numbers, Tensor fields) {
  peer::check_numbers("exchange_merge", numbers);
  const peer::NumberKind kind = peer::number_kind_of(numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  const Exchange exchange = peer::make_exchange("exchange_merge", fields, n, numbers.scalar_type(), kind);
  const bool moments = kind == peer::kMoments;
  Tensor result = peer::new_group_result(numbers);
  const LaunchContext context(numbers.get_device_index());
  dispatch_accumulation(numbers.scalar_type(), [&]<class A>() {
    const ExchangeMergeParams<A> params{exchange, static_cast<const A*>(numbers.data_ptr()),
                                        static_cast<A*>(result.data_ptr()), n / 2 - moments, moments};
    STD_CUDA_CHECK(launch(exchange_merge_kernel<A>, {1, context}, params));
  });
  return result;
}

}  // namespace fastvit
