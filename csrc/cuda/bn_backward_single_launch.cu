// bn_backward without sums: bn_reduce and the op in one launch, for tensors that fit on chip; the same bits
// as the two ops.
// Memory   reads x or y, dy (and residual) once; writes dx (and dresidual) once.
// Mapping  block = (tile of channels, slice of their values), see plan.h; a block holds its values in shared
//          memory. The slices' blocks wait for each other, tile by tile, so all must be resident.
// Numerics as bn_reduce and bn_backward.
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch_memory.h"
#include "smem_cache.cuh"

namespace fastvit {

template <class A>
struct BnBackwardSingleLaunchParams : BnBackwardArgs {
  LaunchPlan plan;
  SliceResults<GradientSums<A>> slice_results;
};

template <class T, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_backward_single_launch_kernel(
    const __grid_constant__ KernelParams<BnBackwardSingleLaunchParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == GradientVariant::residual;
  constexpr int kOperands = kResidual ? 5 : 3, U = kResidual ? kBatch / 2 : kBatch;
  constexpr int K = kIsRows ? V : 1, kTile = kIsRows ? kMaxTile : 1;
  const LaunchPlan& plan = args.plan;
  const BlockWork work(plan, blockIdx.x);
  __shared__ GradientConstants<A, kVariant> table[kTile];
  __shared__ StatisticsCorrection<A> corrections[kTile];
  const int64_t first = work.first_channel(plan), C = plan.layout.channels;
  for (int g = threadIdx.x; g < work.channels(plan); g += kThreads)
    table[g] = GradientConstants<A, kVariant>::of(args, first + g);
  __syncthreads();
  const A limit = xhat_limit_of<A, kVariant>(args);

  FASTVIT_DYNAMIC_SHARED(memory);
  SmemCache<T, V, kResidual ? 3 : 2> cache(memory);
  const auto get = [&]<class B>(const B& one, int j) {
    GradientInputs<T, kVariant, B> inputs;
    cache.load(one, 0, inputs.input, j);
    cache.load(one, 1, inputs.dy, j);
    if constexpr (kResidual) cache.load(one, 2, inputs.residual, j);
    return inputs;
  };
  KahanSums<A> running[K];
  GradientConstants<A, kVariant> constants[K];
  load_thread_constants<kIsRows, V>(constants, table, plan, work);
  for_each_batch<kIsRows, V, U, kOperands, WalkOrder::descending>(
      plan, work, args.input, [&]<class B>(const B& batch) {
        GradientInputs<T, kVariant, B> inputs;
        inputs.template load<kEvictFirst, BackwardStrides::residual>(batch, args);
        cache.store(batch, 0, inputs.input);
        cache.store(batch, 1, inputs.dy);
        if constexpr (kResidual) cache.store(batch, 2, inputs.residual);
        force_reload_from_shared();
        accumulate_sums<T, kIsRows>(running, batch, constants, args, limit,
                                    [&](int j) { return get(batch.vector(j), j); });
        cache.advance(batch);
      });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(GradientSums<A>)];
  GradientSums<A>* shared = reinterpret_cast<GradientSums<A>*>(bytes);
  const int stride = merge_block(shared, running, plan, work);
  A* const sums = static_cast<A*>(args.local_sums);
  merge_slices<true>(shared, stride, args.slice_results, plan, work, [&](int64_t c, GradientSums<A> total) {
    if (kVariant != GradientVariant::from_output) total.dv_second *= saved_invstd<A>(args, c);
    corrections[c - first] = StatisticsCorrection<A>::template of<kVariant>(args, c, total);
    if (work.slice == 0) {
      sums[c] = total.dv;
      sums[C + c] = total.dv_second;
    }
  });
  __syncthreads();

  StatisticsCorrection<A> correction[K];
  load_thread_constants<kIsRows, V>(constants, table, plan,
                                    work);  // read again, to free registers in between
  load_thread_constants<kIsRows, V>(correction, corrections, plan, work);
  cache.rewind();
  for_each_batch<kIsRows, V, U, kOperands, WalkOrder::descending>(
      plan, work, args.input, [&]<class B>(const B& batch) {
#pragma unroll
        for (int j = 0; j < B::U; ++j) {
          const auto one = batch.vector(j);
          auto inputs = get(one, j);
          write_gradients<kIsRows>(one, inputs, constants, correction, args, limit);
        }
        cache.advance(batch);
      });
}

bool backend::bn_backward_single_launch(const BnBackwardArgs& args) {
  if (args.layout.numel() == 0) return false;
  const LaunchContext context(args.device);
  bool done = false;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const int cached_operands = args.residual ? 3 : 2;
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 5 : 3,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .merged_operands = cached_operands}
                                .plan_single_launch();
    if (plan.vectors_in_shared == 0) return;
    const MergeMemory<GradientSums<A>> merge_memory(plan, context);
    const BnBackwardSingleLaunchParams<A> params{{args}, plan, merge_memory.slice_results()};
    dispatch_vector_kernel<T>(plan, [&]<bool kIsRows, int V>() {
      const auto kernel = dispatch_variant(args, [&]<GradientVariant kVariant>() {
        return bn_backward_single_launch_kernel<T, kIsRows, V, kVariant>;
      });
      done = try_single_launch(kernel, plan, cached_operands, context, params);
    });
  });
  return done;
}

}  // namespace fastvit
