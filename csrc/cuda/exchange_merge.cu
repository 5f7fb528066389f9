// exchange_merge: sends this rank's moments (mean, M2 and count) or sums, which an op without the argument
// `exchange` has computed, to all ranks (processes) of a group, and merges those of all ranks. Moments are
// merged by Chan's update; sums are added.
//
// Memory:   a packet of 16 bytes carries 8 bytes of numbers and two epochs (the exchange's number). Bound by
//           latency.
// Mapping:  one block, each thread for every kThreads-th channel. The block sends the numbers of all
//           channels, then waits for those of all ranks, see exchange.cuh.
// Numerics: merges in double and in the order of ranks, so all ranks get the same bits.
// Source:   Chan, Golub, LeVeque (1979), see moments.h.
#include "exchange.cuh"

#include "../sync/exchange_descriptor.h"
#include "exchange_ops.h"
#include "launch.cuh"

namespace fastvit {
namespace {

// A: float or double, the type of the numbers.
template <class A>
struct ExchangeMergeParams {
  Exchange group_exchange;  // arenas, tag, report; KernelParams finds this name, and delays the next kernel
  // This rank's moments [2C + 2] (mean[C], M2[C], the count as two numbers), or sums [2C] (first sums[C],
  // second sums[C]).
  const A* numbers;
  A* result;  // merged moments [2C + 2], or two rows of sums [2][2C]: this rank's, then the total
  int64_t C;
  bool are_moments;
};

// A: as in ExchangeMergeParams.
template <class A>
__global__ void __launch_bounds__(kThreads)
    exchange_merge_kernel(const __grid_constant__ KernelParams<ExchangeMergeParams<A>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  const int64_t C = args.C;
  // send_pair() sends the two numbers of a channel; send_header() sends the header and, for moments, the
  // count.
  const MessageSender<A> sender(args.group_exchange);
  for (int64_t c = threadIdx.x; c < C; c += kThreads) {
    const A first = args.numbers[c], second = args.numbers[C + c];
    sender.send_pair(c, first, second);
    if (!args.are_moments) args.result[c] = first, args.result[C + c] = second;
  }
  const ChannelRange all_channels{0, int(C)};
  if (args.are_moments) {
    sender.send_header(C, unpack_count(args.numbers + 2 * C));
    receive_moments(args.group_exchange, all_channels, args.result, C);
  } else {
    sender.send_header();
    receive_sums(args.group_exchange, all_channels, args.result + 2 * C, C);
  }
}

}  // namespace

Tensor cuda_exchange_merge(Tensor numbers, Tensor exchange) {
  peer::check_numbers("exchange_merge", numbers);
  const peer::NumberKind kind = peer::number_kind_of(numbers);
  const int64_t n = peer::numbers_per_rank(numbers);
  const Exchange group_exchange =
      peer::make_exchange("exchange_merge", exchange, n, numbers.scalar_type(), kind);
  const bool are_moments = kind == peer::kMoments;
  Tensor result = peer::new_group_result(numbers);
  const LaunchContext context(numbers.get_device_index());
  dispatch_accumulation(numbers.scalar_type(), [&]<class A>() {
    const ExchangeMergeParams<A> params{.group_exchange = group_exchange,
                                        .numbers = static_cast<const A*>(numbers.data_ptr()),
                                        .result = static_cast<A*>(result.data_ptr()),
                                        .C = are_moments ? n / 2 - 1 : n / 2,
                                        .are_moments = are_moments};
    STD_CUDA_CHECK(launch(exchange_merge_kernel<A>, {.blocks = 1, .context = context}, params));
  });
  return result;
}

}  // namespace fastvit
