// bn_stats: the moments of each channel: mean, M2 = sum (x - mean)^2 and the number of values. With an
// exchange between ranks they are the moments of all ranks' values.
//
// Memory:   reads x once; writes mean[C], M2[C] and the count, as two numbers. Bound by bandwidth.
// Mapping:  a block has a tile (some channels) and a slice (a share of their values), see plan.h. The last
//           block of a tile to finish merges the slices. Loads of 16 bytes.
// Numerics: moments of usually 32 values, relative to the first of them, are merged by Chan's update, see
//           chunked_moments.cuh; float (double for double), in a fixed order, without float atomics.
// Source:   Chan, Golub, LeVeque (1979), see moments.h.
#include "../batch_norm.h"
#include "chunked_moments.cuh"
#include "exchange.cuh"
#include "launch.cuh"
#include "launch_memory.h"

namespace fastvit {

template <class A, bool kHasExchange>
using BnStatsParams = ReductionParams<BnStatsArgs, PartialMoments<A>, kHasExchange>;

// T: storage type of x. V: elements of a vector, which is 16 bytes or one element.
// kHasExchange: the moments of all ranks are merged.
// kIsRows: a thread takes V columns of the rows of its slice, with the moments of each; otherwise a block
// walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
template <class T, bool kHasExchange, bool kIsRows, int V>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_stats_kernel(
    const __grid_constant__ KernelParams<BnStatsParams<Accumulation<T>, kHasExchange>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  using ThreadMoments = ChunkedMoments<T, kIsRows, V>;
  const BlockWork work(args.plan, blockIdx.x);
  ThreadMoments thread_moments(args.plan, work, args.x);
  for_each_batch<kIsRows, V, kMaxBatchVectors, /*kOperands=*/1, WalkOrder::ascending>(
      args.plan, work, /*operand0=*/args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U];
        batch.load(x, args.x, ForwardOperandIndex::x);
        thread_moments.add(batch, x);
      });

  // Of the tile's channels: the value to which means are relative after finish().
  __shared__ A pivots[ThreadMoments::kTileCapacity];
  // Bytes, because a __shared__ array cannot have a constructor. After merge_block, the block's result for a
  // channel of the tile is element tile_channel * stride.
  __shared__ __align__(
      16) unsigned char bytes[kThreads * ThreadMoments::kThreadChannels * sizeof(PartialMoments<A>)];
  PartialMoments<A>* block_moments = reinterpret_cast<PartialMoments<A>*>(bytes);
  // Writes `pivots`, each the channel's first value in memory, and makes the thread's means relative to them.
  thread_moments.finish(pivots, args.plan, work);
  const int stride = merge_block(block_moments, thread_moments.moments, args.plan, work);
  const int64_t first_channel = work.first_channel(args.plan), C = args.layout.channels;
  const double count = args.layout.values_per_channel();
  A* const moments = static_cast<A*>(args.moments);
  if constexpr (kHasExchange) {
    const MessageSender<A> sender(args.group_exchange);
    sender.send_header(C, count);
    const auto send = [&](int64_t c, const PartialMoments<A>& channel_moments) {
      sender.send_pair(c, pivots[c - first_channel] + channel_moments.mean, channel_moments.m2);
    };
    if (merge_slices(block_moments, stride, args.slice_results, args.plan, work, send))
      // Returned true: this block has finished its tile. The blocks that finish the last tiles, at most
      // max_ranges of them, receive the moments of all ranks, each for a range of channels.
      receive_in_last_blocks(
          args.plan, args.max_ranges, args.exchange_counters,
          [&](const ChannelRange& range) { receive_moments(args.group_exchange, range, moments, C); });
  } else {
    merge_slices(block_moments, stride, args.slice_results, args.plan, work,
                 [&](int64_t c, const PartialMoments<A>& channel_moments) {
                   moments[c] = pivots[c - first_channel] + channel_moments.mean;
                   moments[C + c] = channel_moments.m2;
                 });
    if (blockIdx.x == 0 && threadIdx.x == 0) pack_count(moments + 2 * C, count);
  }
}

void backend::bn_stats(const BnStatsArgs& args) {
  const LaunchContext context(args.device);
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x};
    dispatch_exchange<A>(
        args, context.limits, [&]<bool kHasExchange>(const ExchangeParams<kHasExchange>& exchange_params) {
          const auto kernel_of = [&]<bool kIsRows, int V>() {
            return bn_stats_kernel<T, kHasExchange, kIsRows, V>;
          };
          const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                                .pointers = pointers,
                                                .operands = 1,
                                                .element_size = sizeof(T),
                                                .limits = context.limits,
                                                .reduced_operands = 1}
                                      .plan(make_resident_blocks_query<T>(context, kernel_of));
          const MergeMemory<PartialMoments<A>> merge_memory(plan, context, kHasExchange);
          const BnStatsParams<A, kHasExchange> params{
              {{args}, plan}, exchange_params, merge_memory.slice_results(), merge_memory.exchange_counters};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, params);
        });
  });
}

}  // namespace fastvit
