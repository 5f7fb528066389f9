// bn_reduce: sum dv and sum dv * xhat of each channel; dv is the gradient of the activation's input. With an
// exchange between ranks, the result has 2C more numbers: the sums over all ranks.
//
// Memory:   reads x or y, dy (and the residual) once; writes 2C numbers, with an exchange 4C.
// Mapping:  a block has a tile (some channels) and a slice (a share of their values), see plan.h. The last
//           block of a tile to finish merges the slices. Loads of 16 bytes where alignment allows them.
// Numerics: each thread adds the sums of its batches with Kahan's compensation; float (double for double), in
//           a fixed order, without float atomics.
// Needs:    an input y (from_output) must come from bn_forward_inplace or bn_forward with invertible=True.
// Source:   arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "exchange.cuh"
#include "launch.cuh"
#include "launch_memory.h"

namespace fastvit {

template <class A, bool kHasExchange>
using BnReduceParams = ReductionParams<BnBackwardArgs, GradientSums<A>, kHasExchange>;

// T: storage type of the tensors. V: elements of a vector, which is 16 bytes or one element.
// kVariant: dv is computed from x, from x and a residual, or from y.
// kHasExchange: the sums are added over ranks.
// kIsRows: a thread takes V columns of the rows of its slice, with constants and sums of each; otherwise a
// block walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
// Kept in one function: with finish_and_write_sums outside of it, some kernels would need more registers.
template <class T, bool kHasExchange, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_reduce_kernel(
    const __grid_constant__ KernelParams<BnReduceParams<Accumulation<T>, kHasExchange>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  constexpr bool kHasResidual = kVariant == GradientVariant::residual;
  constexpr int kOperands = kHasResidual ? 3 : 2;  // input, dy (and the residual)
  constexpr int kThreadChannels = kIsRows ? V : 1;
  constexpr int kBatchVectors = batch_vectors_of_reduction(kOperands);
  const BlockWork work(args.plan, gridDim.x - 1 - blockIdx.x);  // in reverse, as the walk
  __shared__ GradientConstants<A, kVariant> tile_constants[kIsRows ? kMaxTileChannels : 1];
  const int channels = work.channels(args.plan);
  for (int tile_channel = threadIdx.x; tile_channel < channels; tile_channel += kThreads)
    tile_constants[tile_channel] =
        GradientConstants<A, kVariant>::load(args, work.first_channel(args.plan) + tile_channel);
  __syncthreads();
  GradientConstants<A, kVariant> thread_constants[kThreadChannels];
  load_thread_constants<kIsRows, V>(thread_constants, tile_constants, args.plan, work);
  // |xhat| of n values is at most sqrt(n - 1). An xhat that is recovered from a rounded y is clamped to that.
  const A max_abs_xhat = compute_max_abs_xhat<A, kVariant>(args);

  // The op that wrote dy usually wrote its end last, and the L2 cache still has it: the walk begins there.
  KahanSums<A> thread_sums[kThreadChannels];
  for_each_batch<kIsRows, V, kBatchVectors, kOperands, WalkOrder::descending>(
      args.plan, work, /*operand0=*/args.input, [&]<class B>(const B& batch) {
        GradientInputs<T, kVariant, B> inputs;
        inputs.template load<kNoCacheHint, /*kResidualOperand=*/ReduceOperandIndex::residual>(batch, args);
        accumulate_sums<T, kIsRows>(thread_sums, batch, thread_constants, args, max_abs_xhat,
                                    [&](int j) { return inputs.get_vector(j); });
      });

  // Bytes, because a __shared__ array cannot have a constructor. After merge_block, the block's sums of a
  // channel of its tile are block_sums[tile_channel * stride].
  __shared__ __align__(16) unsigned char bytes[kThreads * kThreadChannels * sizeof(GradientSums<A>)];
  GradientSums<A>* block_sums = reinterpret_cast<GradientSums<A>*>(bytes);
  const int stride = merge_block(block_sums, thread_sums, args.plan, work);
  const int64_t C = args.layout.channels;
  A* const local_sums = static_cast<A*>(args.local_sums);
  const auto finish_and_write_sums = [&](int64_t c, GradientSums<A> sums) {
    // If the input is x, the second sum is of dv * (x - mean); invstd makes it the sum of dv * xhat.
    if (kVariant != GradientVariant::from_output)
      sums.dv_times_second_factor *= load_saved_invstd<A>(args, c);
    local_sums[c] = sums.dv;
    local_sums[C + c] = sums.dv_times_second_factor;
    return sums;
  };
  if constexpr (kHasExchange) {
    const MessageSender<A> sender(args.group_exchange);
    sender.send_header();  // of all threads that call, one sends it
    const auto write_and_send = [&](int64_t c, const GradientSums<A>& channel_sums) {
      const GradientSums<A> sums = finish_and_write_sums(c, channel_sums);
      sender.send_pair(c, sums.dv, sums.dv_times_second_factor);
    };
    if (merge_slices(block_sums, stride, args.slice_results, args.plan, work, write_and_send))
      // Returned true: this block has finished its tile. The blocks that finish the last tiles, at most
      // max_ranges of them, receive the sums of all ranks, each for a range of channels.
      receive_in_last_blocks(args.plan, args.max_ranges, args.exchange_counters,
                             [&](const ChannelRange& range) {
                               receive_sums(args.group_exchange, range, /*result=*/local_sums + 2 * C, C);
                             });
  } else {
    merge_slices(block_sums, stride, args.slice_results, args.plan, work, finish_and_write_sums);
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
            return dispatch_gradient_variant(args, [&]<GradientVariant kVariant>() {
              return bn_reduce_kernel<T, kHasExchange, kIsRows, V, kVariant>;
            });
          };
          const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                                .pointers = pointers,
                                                .operands = operands,
                                                .element_size = sizeof(T),
                                                .limits = context.limits,
                                                .reduced_operands = operands}
                                      .plan(make_resident_blocks_query<T>(context, kernel_of));
          const MergeMemory<GradientSums<A>> merge_memory(plan, context, kHasExchange);
          const BnReduceParams<A, kHasExchange> params{
              {{args}, plan}, exchange_params, merge_memory.slice_results(), merge_memory.exchange_counters};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, params);
        });
  });
}

}  // namespace fastvit
