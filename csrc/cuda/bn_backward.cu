// bn_backward: dx = scale * (dv - mean(dv) - xhat * mean(dv * xhat)), scale = gamma * invstd. dv is the
// gradient of the activation's input, and dresidual = dv. The means are over a channel's values on all ranks,
// and left out if the forward used the running statistics.
//
// Memory:   reads x or y, dy (and the residual) once; writes dx (and dresidual) once. Bound by bandwidth.
// Mapping:  a block has a tile (some channels) and a slice (a share of their values), see plan.h. Loads and
//           stores of 16 bytes.
// Numerics: arithmetic in float (double for double).
// Needs:    an input y (from_output) must come from bn_forward_inplace or bn_forward with invertible=True.
// Source:   Ioffe and Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

struct BnBackwardParams : BnBackwardArgs {
  LaunchPlan plan;
};

// T: storage type of the tensors. V: elements of a vector, which is 16 bytes or one element.
// kVariant: dv is computed from x, from x and a residual, or from y.
// kIsRows: a thread takes V columns of the rows of its slice, with the constants of each; otherwise a block
// walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
template <class T, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    bn_backward_kernel(const __grid_constant__ KernelParams<BnBackwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  constexpr bool kHasResidual = kVariant == GradientVariant::residual;
  constexpr int kOperands = kHasResidual ? 5 : 3;  // input, dy, dx (and the residual, dresidual)
  // Vectors of each operand that a thread has in flight: fewer with a residual, to save registers.
  constexpr int kBatchVectors = kHasResidual ? kMaxBatchVectors / 2 : kMaxBatchVectors;
  constexpr int kThreadChannels = kIsRows ? V : 1, kTileCapacity = kIsRows ? kMaxTileChannels : 1;
  const BlockWork work(args.plan, blockIdx.x);
  __shared__ GradientConstants<A, kVariant> tile_constants[kTileCapacity];
  __shared__ StatisticsCorrection<A> tile_corrections[kTileCapacity];  // dx = scale * (dv - correction)
  const int channels = work.channels(args.plan);
  // Null if the statistics were constants (training=False): then dx = scale * dv.
  const A* const global_sums = static_cast<const A*>(args.global_sums);
  for (int tile_channel = threadIdx.x; tile_channel < channels; tile_channel += kThreads) {
    const int64_t c = work.first_channel(args.plan) + tile_channel;
    tile_constants[tile_channel] = GradientConstants<A, kVariant>::load(args, c);
    tile_corrections[tile_channel] = {0, 0};
    if (global_sums)
      tile_corrections[tile_channel] = StatisticsCorrection<A>::template from_sums<kVariant>(
          args, c, {global_sums[c], global_sums[args.layout.channels + c]});
  }
  __syncthreads();
  GradientConstants<A, kVariant> thread_constants[kThreadChannels];
  StatisticsCorrection<A> thread_corrections[kThreadChannels];
  load_thread_constants<kIsRows, V>(thread_constants, tile_constants, args.plan, work);
  load_thread_constants<kIsRows, V>(thread_corrections, tile_corrections, args.plan, work);
  // |xhat| of n values is at most sqrt(n - 1). An xhat that is recovered from a rounded y is clamped to that.
  const A max_abs_xhat = compute_max_abs_xhat<A, kVariant>(args);

  // If bn_reduce ran before, it read the beginning last, and the L2 cache still has it.
  for_each_batch<kIsRows, V, kBatchVectors, kOperands, WalkOrder::ascending>(
      args.plan, work, /*operand0=*/args.input, [&]<class B>(const B& batch) {
        GradientInputs<T, kVariant, B> inputs;
        inputs.template load<kNoCacheHint, /*kResidualOperand=*/BackwardOperandIndex::residual>(batch, args);
        write_gradients<kIsRows>(batch, inputs, thread_constants, thread_corrections, args, max_abs_xhat);
      });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  const LaunchContext context(args.device);
  if (args.layout.numel() == 0) return;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const auto kernel_of = [&]<bool kIsRows, int V>() {
      return dispatch_gradient_variant(
          args, [&]<GradientVariant kVariant>() { return bn_backward_kernel<T, kIsRows, V, kVariant>; });
    };
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 5 : 3,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .reduced_operands = 0}  // no reduction
                                .plan(make_resident_blocks_query<T>(context, kernel_of));
    launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, BnBackwardParams{{args}, plan});
  });
}

}  // namespace fastvit
