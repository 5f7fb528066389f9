// bn_forward and bn_forward_inplace without given moments: the moments of bn_stats and y in a single launch,
// for a tensor of which a tile (some channels) fits into the shared memory of all multiprocessors. The
// results are those of the two ops, bit by bit.
//
// Memory:   reads x (and the residual) once; writes y once, to a new tensor or over x, and `saved`.
// Mapping:  a block has a tile and a slice (a share of its values), see plan.h, and keeps its x in shared
//           memory. Then it takes another tile, if not all fit at once. The blocks of a tile wait for each
//           other, so all must be resident.
// Numerics: as bn_stats and bn_forward.
// Source:   Ioffe and Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "chunked_moments.cuh"
#include "launch_memory.h"
#include "normalize.cuh"
#include "smem_cache.cuh"

namespace fastvit {

template <class A>
struct BnForwardSingleLaunchParams : BnForwardArgs {
  LaunchPlan plan;
  SliceResults<PartialMoments<A>> slice_results;  // in global memory, until they are merged
};

constexpr int kCachedX = 0;  // index of the cache's only operand
// The operands to which a batch has offsets: x, y (and the residual).
template <bool kHasResidual>
constexpr int kOperands = kHasResidual ? 3 : 2;

// Writes the count, as two numbers, to `saved`, and increments num_batches_tracked. One thread of the grid
// calls it.
template <class A>
__device__ __forceinline__ void write_count(const BnForwardArgs& args, double count) {
  pack_count(static_cast<A*>(args.saved) + 2 * args.layout.channels, count);
  if (args.num_batches_tracked) ++*args.num_batches_tracked;
}

// The second walk: writes y, from the cached x.
template <bool kIsRows, bool kHasResidual, class T, int V, class A>
__device__ __forceinline__ void write_y_from_cache(SmemCache<T, V, /*kOperands=*/1>& cache,
                                                   const BnForwardSingleLaunchParams<A>& args,
                                                   const BlockWork& work,
                                                   const ChannelAffine<A>* tile_affine) {
  ChannelAffine<A> thread_affine[kIsRows ? V : 1];
  load_thread_constants<kIsRows, V>(thread_affine, tile_affine, args.plan, work);
  cache.rewind();
  for_each_batch<kIsRows, V, kMaxBatchVectors, kOperands<kHasResidual>, WalkOrder::ascending>(
      args.plan, work, /*operand0=*/args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], residual[kHasResidual ? B::U : 1];
        if constexpr (kHasResidual)
          batch.template load<kEvictFirst>(residual, args.residual, ForwardOperandIndex::residual);
        cache.load(batch, kCachedX, x);
        cache.advance(batch);
        normalize_batch<kIsRows, kHasResidual>(args, batch, x, residual, thread_affine);
        batch.store(x, args.y, ForwardOperandIndex::y);
      });
}

// T: storage type of x and y. V: elements of a vector of 16 bytes.
// kHasResidual: a residual is added before the activation.
// kIsRows: a thread takes V columns of the rows of its slice, with moments and constants of each; otherwise a
// block walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
template <class T, bool kIsRows, int V, bool kHasResidual>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_forward_single_launch_kernel(
    const __grid_constant__ KernelParams<BnForwardSingleLaunchParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  using ThreadMoments = ChunkedMoments<T, kIsRows, V>;
  const LaunchPlan& plan = args.plan;
  FASTVIT_DYNAMIC_SHARED(cache_bytes);  // declares the launch's dynamic shared memory
  // After finish() a thread's means are relative to the channel's pivot, its first value in memory. A pivot
  // must be read before the blocks wait for each other: afterwards another block may overwrite x with y.
  __shared__ A pivots[ThreadMoments::kTileCapacity];
  __shared__ ChannelAffine<A> tile_affine[ThreadMoments::kTileCapacity];
  // Bytes: a __shared__ array cannot have a constructor. merge_block leaves results at tile_channel * stride.
  __shared__ __align__(
      16) unsigned char bytes[kThreads * ThreadMoments::kThreadChannels * sizeof(PartialMoments<A>)];
  PartialMoments<A>* block_moments = reinterpret_cast<PartialMoments<A>*>(bytes);
  const double count = args.layout.values_per_channel();
  if (blockIdx.x == 0 && threadIdx.x == 0) write_count<A>(args, count);
  for (BlockWork work(plan, blockIdx.x); work.tile < plan.tiles; work.tile += plan.tiles_at_once) {
    SmemCache<T, V, /*kOperands=*/1> cache(cache_bytes);
    ThreadMoments thread_moments(plan, work, args.x);
    for_each_batch<kIsRows, V, kMaxBatchVectors, kOperands<kHasResidual>, WalkOrder::ascending>(
        plan, work, /*operand0=*/args.x, [&]<class B>(const B& batch) {
          Vector<T, B::V> x[B::U];
          batch.template load<kEvictFirst>(x, args.x, ForwardOperandIndex::x);
          cache.store(batch, kCachedX, x);
          cache.advance(batch);
          thread_moments.add(batch, x);
        });

    thread_moments.finish(pivots, plan, work);
    const int stride = merge_block(block_moments, thread_moments.moments, plan, work);
    const int64_t first_channel = work.first_channel(plan);
    merge_slices</*kAllBlocksGetTotals=*/true>(
        block_moments, stride, args.slice_results, plan, work,
        [&](int64_t c, const PartialMoments<A>& channel_moments) {
          const Moments<A> moments{count, pivots[c - first_channel] + channel_moments.mean,
                                   channel_moments.m2};
          const auto mean_invstd = MeanInvstd<A>::from_moments(moments, args.eps);
          tile_affine[c - first_channel] = ChannelAffine<A>::load(args, c, mean_invstd);
          if (work.slice == 0) {
            update_running_stats(args, c, moments, args.momentum);
            mean_invstd.save(args, c);
          }
        });
    // Between this barrier and those of the next tile's merge_block no shared array changes but the cache, in
    // which a thread has places of its own, and the pivots, which have been read.
    __syncthreads();
    write_y_from_cache<kIsRows, kHasResidual>(cache, args, work, tile_affine);
  }
}

// Returns false if a single launch is not possible. The caller then calls bn_stats and bn_forward.
bool backend::bn_forward_single_launch(const BnForwardArgs& args) {
  // A cumulative average's factor depends on num_batches_tracked, which may be incremented only after all
  // blocks have read it. Blocks do not know when the blocks of other tiles have.
  if (args.layout.numel() == 0 || args.cumulative_average) return false;
  const LaunchContext context(args.device);
  bool is_launched = false;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.residual};
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 3 : 2,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .reduced_operands = 1}
                                .plan_single_launch();
    if (plan.vectors_in_shared == 0) return;
    const MergeMemory<PartialMoments<A>> merge_memory(plan, context);
    const BnForwardSingleLaunchParams<A> params{{args}, plan, merge_memory.slice_results()};
    dispatch_vector_kernel<T>(plan, [&]<bool kIsRows, int V>() {
      const auto kernel = args.residual ? bn_forward_single_launch_kernel<T, kIsRows, V, true>
                                        : bn_forward_single_launch_kernel<T, kIsRows, V, false>;
      is_launched = try_single_launch(kernel, plan, /*cached_operands=*/1, context, params);
    });
  });
  return is_launched;
}

}  // namespace fastvit
