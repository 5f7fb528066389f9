// bn_stats: mean, M2 (sum of squared deviations) and the count of values, per channel; with an exchange over
// all ranks.
// Memory   reads x once; writes 2C + 2 numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics groups of 32 values, relative to the first of the group, merged by Chan's update, see chunked_moments.cuh;
//          fp32 (fp64 for double), fixed order, no float atomics.
// Source   Chan, Golub, LeVeque (1979), see moments.h.
#include "../batch_norm.h"
#include "launch.cuh"
#include "exchange.cuh"
#include "launch_memory.h"
#include "chunked_moments.cuh"

namespace fastvit {

template <class A, bool kHasExchange>
struct StatsParams : Planned<BnStatsArgs>, ExchangeParams<kHasExchange> {
  Partials<PartialMoments<A>> partials;
  unsigned* exchange_words;
};

template <class T, bool kHasExchange, bool kRows, int V>
__global__ void __launch_bounds__(kThreads, kResident)
    stats_kernel(const __grid_constant__ Launched<StatsParams<Accumulation<T>, kHasExchange>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  using Mine = ThreadStats<T, kRows, V>;
  const Work work(args.plan, blockIdx.x);
  Mine mine(args.plan, work, args.x);
  walk<kRows, V, kBatch, 1, false>(args.plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U];
    batch.load(x, args.x, ForwardOperand::x);
    mine.add(batch, x);
  });

  __shared__ A pivots[Mine::kTile];
  __shared__ __align__(16) unsigned char bytes[kThreads * Mine::K * sizeof(PartialMoments<A>)];
  PartialMoments<A>* shared = reinterpret_cast<PartialMoments<A>*>(bytes);
  mine.end(pivots, args.plan, work);
  const int stride = merge_block(shared, mine.moments, args.plan, work);
  const int64_t first = work.first_channel(args.plan), C = args.layout.C;
  const double count = args.layout.count();
  A* const moments = static_cast<A*>(args.moments);
  if constexpr (kHasExchange) {
    const Push<A> push(args.peers);
    push.header(C, count);
    const auto send = [&](int64_t c, const PartialMoments<A>& total) {
      push.pair(c, pivots[c - first] + total.mean, total.m2);
    };
    if (finish(shared, stride, args.partials, args.plan, work, send))
      wait_in_last_blocks(args.plan, args.max_parts, args.exchange_words,
                          [&](const Part& part) { end_moments(args.peers, part, moments, C); });
  } else {
    finish(shared, stride, args.partials, args.plan, work, [&](int64_t c, const PartialMoments<A>& total) {
      moments[c] = pivots[c - first] + total.mean;
      moments[C + c] = total.m2;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) store_count(moments + 2 * C, count);
  }
}

void backend::bn_stats(const BnStatsArgs& args) {
  const Device device(args.device);
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x};
    dispatch_exchange<A>(
        args, device.limits, [&]<bool kHasExchange>(const ExchangeParams<kHasExchange>& shares) {
          const auto kernel_of = [&]<bool kRows, int V>() { return stats_kernel<T, kHasExchange, kRows, V>; };
          const Plan plan = Planner{args.layout, pointers, 1, sizeof(T), device.limits, 1}.plan(
              resident_blocks<T>(device, kernel_of));
          const Slices<PartialMoments<A>> slices(plan, device, kHasExchange);
          const StatsParams<A, kHasExchange> params{
              {args, plan}, shares, slices.partials(), slices.exchange_words};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), device}, params);
        });
  });
}

}  // namespace fastvit
