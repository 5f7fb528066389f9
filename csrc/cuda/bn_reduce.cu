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
struct BnReduceParams : Planned<BnBackwardArgs>, ExchangeParams<kHasExchange> {
  SliceResults<Sums<A>> partials;
  unsigned* exchange_counters;
};

template <class T, bool kHasExchange, bool kIsRows, int V, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_reduce_kernel(
    const __grid_constant__ KernelParams<BnReduceParams<Accumulation<T>, kHasExchange>> kernel_params) {
  const auto& args = kernel_params.wait_and_get();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == Variant::residual;
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
        inputs.template load<kNormal, ReduceStrides::residual>(batch, args);
        accumulate_sums<T, kIsRows>(running, batch, constants, args, limit,
                                    [&](int j) { return inputs.vector(j); });
      });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Sums<A>)];
  Sums<A>* shared = reinterpret_cast<Sums<A>*>(bytes);
  const int stride = merge_block(shared, running, args.plan, work);
  const int64_t C = args.layout.channels;
  A* const sums = static_cast<A*>(args.local_sums);
  const auto write = [&](int64_t c, Sums<A> total) {
    if (kVariant != Variant::from_output) total.second *= saved_invstd<A>(args, c);
    sums[c] = total.first;
    sums[C + c] = total.second;
    return total;
  };
  if constexpr (kHasExchange) {
    const MessageSender<A> push(args.group_exchange);
    push.header();
    if (merge_slices(shared, stride, args.partials, args.plan, work, [&](int64_t c, const Sums<A>& total) {
          const Sums<A> own = write(c, total);
          push.pair(c, own.first, own.second);
        }))
      receive_in_last_blocks(
          args.plan, args.max_ranges, args.exchange_counters,
          [&](const ChannelRange& part) { receive_sums(args.group_exchange, part, sums + 2 * C, C); });
  } else {
    merge_slices(shared, stride, args.partials, args.plan, work, write);
  }
}

void backend::bn_reduce(const BnBackwardArgs& args) {
  const LaunchContext context(args.device);
  if (args.layout.channels == 0) return;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.residual};
    const int operands = args.residual ? 3 : 2;
    dispatch_exchange<A>(args, context.limits,
                         [&]<bool kHasExchange>(const ExchangeParams<kHasExchange>& exchange_params) {
                           const auto kernel_of = [&]<bool kIsRows, int V>() {
                             return dispatch_variant(args, [&]<Variant kVariant>() {
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
                           const MergeMemory<Sums<A>> slices(plan, context, kHasExchange);
                           const BnReduceParams<A, kHasExchange> params{
                               {args, plan}, exchange_params, slices.partials(), slices.exchange_counters};
                           launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, params);
                         });
  });
}

}  // namespace fastvit
