// bn_stats: mean, M2 (sum of squared deviations) and the count of values, per channel; with an exchange over
// all ranks.
// Memory   reads x once; writes 2C + 2 numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics groups of 32 values, relative to the first of the group, merged by Chan's update, see chunked_moments.cuh;
//          fp32 (fp64 for double), fixed order, no float atomics.
// Source   Chan, Golub, LeVeque (1979), see moments.h.
#include "../batch_norm.h"
#include "chunked_moments.cuh"
#include "exchange.cuh"
#include "launch.cuh"
#include "launch_memory.h"

namespace fastvit {

template <class A, bool kHasExchange>
struct BnStatsParams : BnStatsArgs, ExchangeParams<kHasExchange> {
  LaunchPlan plan;
  SliceResults<PartialMoments<A>> slice_results;
  unsigned* exchange_counters;
};

template <class T, bool kHasExchange, bool kIsRows, int V>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_stats_kernel(
    const __grid_constant__ KernelParams<BnStatsParams<Accumulation<T>, kHasExchange>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  using ThreadMoments = ChunkedMoments<T, kIsRows, V>;
  const BlockWork work(args.plan, blockIdx.x);
  ThreadMoments thread_moments(args.plan, work, args.x);
  for_each_batch<kIsRows, V, kBatch, 1, WalkOrder::ascending>(args.plan, work, args.x,
                                                              [&]<class B>(const B& batch) {
                                                                Vector<T, B::V> x[B::U];
                                                                batch.load(x, args.x, ForwardStrides::x);
                                                                thread_moments.add(batch, x);
                                                              });

  __shared__ A pivots[ThreadMoments::kTile];
  __shared__ __align__(16) unsigned char bytes[kThreads * ThreadMoments::K * sizeof(PartialMoments<A>)];
  PartialMoments<A>* shared = reinterpret_cast<PartialMoments<A>*>(bytes);
  thread_moments.finish(pivots, args.plan, work);
  const int stride = merge_block(shared, thread_moments.moments, args.plan, work);
  const int64_t first = work.first_channel(args.plan), C = args.layout.channels;
  const double count = args.layout.values_per_channel();
  A* const moments = static_cast<A*>(args.moments);
  if constexpr (kHasExchange) {
    const MessageSender<A> push(args.group_exchange);
    push.header(C, count);
    const auto send = [&](int64_t c, const PartialMoments<A>& total) {
      push.pair(c, pivots[c - first] + total.mean, total.m2);
    };
    if (merge_slices(shared, stride, args.slice_results, args.plan, work, send))
      receive_in_last_blocks(
          args.plan, args.max_ranges, args.exchange_counters,
          [&](const ChannelRange& part) { receive_moments(args.group_exchange, part, moments, C); });
  } else {
    merge_slices(shared, stride, args.slice_results, args.plan, work,
                 [&](int64_t c, const PartialMoments<A>& total) {
                   moments[c] = pivots[c - first] + total.mean;
                   moments[C + c] = total.m2;
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
                                                .merged_operands = 1}
                                      .plan(resident_blocks<T>(context, kernel_of));
          const MergeMemory<PartialMoments<A>> merge_memory(plan, context, kHasExchange);
          const BnStatsParams<A, kHasExchange> params{
              {args}, exchange_params, plan, merge_memory.slice_results(), merge_memory.exchange_counters};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, params);
        });
  });
}

}  // namespace fastvit
