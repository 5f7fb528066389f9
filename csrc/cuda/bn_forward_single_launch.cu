// bn_forward and bn_forward_inplace without moments: bn_stats and the op in one launch, for tensors that fit
// on chip; the same bits as the two ops.
// Memory   reads x (and residual) once, writes y once, over x or to a new tensor.
// Mapping  block = (tile of channels, slice of their values), see plan.h; a block holds its values in shared
//          memory. The slices' blocks wait for each other, tile by tile, so all must be resident.
// Numerics as bn_stats and bn_forward.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "chunked_moments.cuh"
#include "launch_memory.h"
#include "normalize.cuh"
#include "smem_cache.cuh"

namespace fastvit {

template <class A>
struct BnForwardSingleLaunchParams : BnForwardArgs {
  LaunchPlan plan;
  SliceResults<PartialMoments<A>> slice_results;
};

template <class T, bool kIsRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_forward_single_launch_kernel(
    const __grid_constant__ KernelParams<BnForwardSingleLaunchParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  using ThreadMoments = ChunkedMoments<T, kIsRows, V>;
  constexpr int kOperands = kResidual ? 3 : 2;
  const LaunchPlan& plan = args.plan;
  const BlockWork work(plan, blockIdx.x);
  FASTVIT_DYNAMIC_SHARED(memory);
  SmemCache<T, V, 1> cache(memory);
  ThreadMoments thread_moments(plan, work, args.x);
  for_each_batch<kIsRows, V, kBatch, kOperands, WalkOrder::ascending>(
      plan, work, args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U];
        batch.template load<kEvictFirst>(x, args.x, ForwardStrides::x);
        cache.store(batch, 0, x);
        cache.advance(batch);
        thread_moments.add(batch, x);
      });

  // Pivots are read before the blocks wait for each other; afterwards another block may overwrite them.
  __shared__ A pivots[ThreadMoments::kTile];
  __shared__ ChannelAffine<A> table[ThreadMoments::kTile];
  const int64_t first = work.first_channel(plan);
  __shared__ __align__(16) unsigned char bytes[kThreads * ThreadMoments::K * sizeof(PartialMoments<A>)];
  PartialMoments<A>* shared = reinterpret_cast<PartialMoments<A>*>(bytes);
  thread_moments.finish(pivots, plan, work);
  const int stride = merge_block(shared, thread_moments.moments, plan, work);
  const double count = args.layout.values_per_channel();
  merge_slices<true>(shared, stride, args.slice_results, plan, work,
                     [&](int64_t c, const PartialMoments<A>& total) {
                       const Moments<A> all{count, pivots[c - first] + total.mean, total.m2};
                       const auto n = MeanInvstd<A>::from_moments(all, args.eps);
                       table[c - first] = ChannelAffine<A>::of(args, c, n);
                       if (work.slice == 0) {
                         update_running(args, c, all, args.momentum);
                         n.save(args, c);
                       }
                     });
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    pack_count(static_cast<A*>(args.saved) + 2 * args.layout.channels, count);
    if (args.num_batches_tracked) ++*args.num_batches_tracked;
  }
  __syncthreads();

  ChannelAffine<A> affine[kIsRows ? V : 1];
  load_thread_constants<kIsRows, V>(affine, table, plan, work);
  cache.rewind();
  for_each_batch<kIsRows, V, kBatch, kOperands, WalkOrder::ascending>(
      plan, work, args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], residual[kResidual ? B::U : 1];
        if constexpr (kResidual)
          batch.template load<kEvictFirst>(residual, args.residual, ForwardStrides::residual);
        cache.load(batch, 0, x);
        cache.advance(batch);
        normalize_batch<kIsRows, kResidual>(args, batch, x, residual, affine);
        batch.store(x, args.y, ForwardStrides::y);
      });
}

bool backend::bn_forward_single_launch(const BnForwardArgs& args) {
  // The counter of a cumulative average is incremented after every block has read it.
  if (args.layout.numel() == 0 || args.cumulative_average) return false;
  const LaunchContext context(args.device);
  bool done = false;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.residual};
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 3 : 2,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .merged_operands = 1}
                                .plan_single_launch();
    if (plan.vectors_in_shared == 0) return;
    const MergeMemory<PartialMoments<A>> merge_memory(plan, context);
    const BnForwardSingleLaunchParams<A> params{{args}, plan, merge_memory.slice_results()};
    dispatch_vector_kernel<T>(plan, [&]<bool kIsRows, int V>() {
      const auto kernel = args.residual ? bn_forward_single_launch_kernel<T, kIsRows, V, true>
                                        : bn_forward_single_launch_kernel<T, kIsRows, V, false>;
      done = try_single_launch(kernel, plan, 1, context, params);
    });
  });
  return done;
}

}  // namespace fastvit
