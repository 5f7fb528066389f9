// bn_reduce: sum dv and sum dv*xhat per channel; dv is the gradient before the activation. With
// an exchange a second row has the sums over all ranks.
// Memory   reads x or y, dy (and residual) once; writes 2C numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics fp32 accumulation (fp64 for double), compensated, in a fixed order, no float atomics. From x the
//          second sum is of dv*(x - mean), multiplied by invstd at the end.
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "exchange.cuh"
#include "launch.cuh"
#include "launch_memory.h"

namespace fastvit {

template <class A, bool kHasExchange>
struct BnReduceParams : BnBackwardArgs, ExchangeParams<kHasExchange> {
  LaunchPlan plan;
  SliceResults<GradientSums<A>> slice_results;
  unsigned* exchange_counters;
};

template <class T, bool kHasExchange, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_reduce_kernel(
    const __grid_constant__ KernelParams<BnReduceParams<Accumulation<T>, kHasExchange>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == GradientVariant::residual;
  constexpr int kOperands = kResidual ? 3 : 2, U = kResidual ? kBatch / 2 : kBatch, K = kIsRows ? V : 1;
  const BlockWork work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ GradientConstants<A, kVariant> table[kIsRows ? kMaxTile : 1];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads)
    table[g] = GradientConstants<A, kVariant>::of(args, work.first_channel(args.plan) + g);
  __syncthreads();
  GradientConstants<A, kVariant> constants[K];
  load_thread_constants<kIsRows, V>(constants, table, args.plan, work);
  const A limit = xhat_limit_of<A, kVariant>(args);

  KahanSums<A> running[K];
  for_each_batch<kIsRows, V, U, kOperands, WalkOrder::descending>(
      args.plan, work, args.input, [&]<class B>(const B& batch) {
        GradientInputs<T, kVariant, B> inputs;
        inputs.template load<kNoHint, ReduceStrides::residual>(batch, args);
        accumulate_sums<T, kIsRows>(running, batch, constants, args, limit,
                                    [&](int j) { return inputs.vector(j); });
      });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(GradientSums<A>)];
  GradientSums<A>* shared = reinterpret_cast<GradientSums<A>*>(bytes);
  const int stride = merge_block(shared, running, args.plan, work);
  const int64_t C = args.layout.channels;
  A* const sums = static_cast<A*>(args.local_sums);
  const auto write = [&](int64_t c, GradientSums<A> total) {
    if (kVariant != GradientVariant::from_output) total.dv_second *= saved_invstd<A>(args, c);
    sums[c] = total.dv;
    sums[C + c] = total.dv_second;
    return total;
  };
  if constexpr (kHasExchange) {
    const MessageSender<A> push(args.group_exchange);
    push.header();
    if (merge_slices(shared, stride, args.slice_results, args.plan, work,
                     [&](int64_t c, const GradientSums<A>& total) {
                       const GradientSums<A> own = write(c, total);
                       push.pair(c, own.dv, own.dv_second);
                     }))
      receive_in_last_blocks(
          args.plan, args.max_ranges, args.exchange_counters,
          [&](const ChannelRange& part) { receive_sums(args.group_exchange, part, sums + 2 * C, C); });
  } else {
    merge_slices(shared, stride, args.slice_results, args.plan, work, write);
  }
}

void backend::bn_reduce(const BnBackwardArgs& args) {
  const LaunchContext context(args.device);
  if (args.layout.channels == 0) return;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.residual};
    const int operands = args.residual ? 3 : 2;
    dispatch_exchange<A>(
        args, context.limits, [&]<bool kHasExchange>(const ExchangeParams<kHasExchange>& exchange_params) {
          const auto kernel_of = [&]<bool kIsRows, int V>() {
            return dispatch_variant(args, [&]<GradientVariant kVariant>() {
              return bn_reduce_kernel<T, kHasExchange, kIsRows, V, kVariant>;
            });
          };
          const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                                .pointers = pointers,
                                                .operands = operands,
                                                .element_size = sizeof(T),
                                                .limits = context.limits,
                                                .merged_operands = operands}
                                      .plan(resident_blocks<T>(context, kernel_of));
          const MergeMemory<GradientSums<A>> merge_memory(plan, context, kHasExchange);
          const BnReduceParams<A, kHasExchange> params{
              {args}, exchange_params, plan, merge_memory.slice_results(), merge_memory.exchange_counters};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, params);
        });
  });
}

}  // namespace fastvit
