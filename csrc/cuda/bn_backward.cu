// bn_backward: dx = scale * (dv - a - b * (x - mean)), from y scale * (dv - a - b * xhat),
// scale = gamma * invstd, with a and b from the sums over all ranks; with a residual dv is written too, which
// is its gradient.
// Memory   reads x or y, dy (and residual) once; writes dx (and dresidual) once. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads and stores, a batch
//          in flight.
// Numerics fp32 arithmetic (fp64 for double).
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

struct BnBackwardParams : BnBackwardArgs {
  LaunchPlan plan;
};

template <class T, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    bn_backward_kernel(const __grid_constant__ KernelParams<BnBackwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == GradientVariant::residual;
  constexpr int kOperands = kResidual ? 5 : 3, U = kResidual ? kBatch / 2 : kBatch;
  constexpr int K = kIsRows ? V : 1, kTile = kIsRows ? kMaxTile : 1;
  const BlockWork work(args.plan, blockIdx.x);
  __shared__ GradientConstants<A, kVariant> table[kTile];
  __shared__ StatisticsCorrection<A> corrections[kTile];
  const int channels = work.channels(args.plan);
  const A* const sums = static_cast<const A*>(args.global_sums);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = GradientConstants<A, kVariant>::of(args, c);
    corrections[g] = {0, 0};
    if (sums)
      corrections[g] =
          StatisticsCorrection<A>::template of<kVariant>(args, c, {sums[c], sums[args.layout.channels + c]});
  }
  __syncthreads();
  GradientConstants<A, kVariant> constants[K];
  StatisticsCorrection<A> correction[K];
  load_thread_constants<kIsRows, V>(constants, table, args.plan, work);
  load_thread_constants<kIsRows, V>(correction, corrections, args.plan, work);
  const A limit = xhat_limit_of<A, kVariant>(args);

  for_each_batch<kIsRows, V, U, kOperands, WalkOrder::ascending>(
      args.plan, work, args.input, [&]<class B>(const B& batch) {
        GradientInputs<T, kVariant, B> inputs;
        inputs.template load<kNoHint, BackwardStrides::residual>(batch, args);
        write_gradients<kIsRows>(batch, inputs, constants, correction, args, limit);
      });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  const LaunchContext context(args.device);
  if (args.layout.numel() == 0) return;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const auto kernel_of = [&]<bool kIsRows, int V>() {
      return dispatch_variant(
          args, [&]<GradientVariant kVariant>() { return bn_backward_kernel<T, kIsRows, V, kVariant>; });
    };
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 5 : 3,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .merged_operands = 0}
                                .plan(resident_blocks<T>(context, kernel_of));
    launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, BnBackwardParams{{args}, plan});
  });
}

}  // namespace fastvit
