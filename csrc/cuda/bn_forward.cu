// bn_forward, bn_forward_inplace, bn_apply: y = act((x - mean) * scale + beta (+ residual)),
// scale = gamma * invstd. Given moments, the same launch updates the running statistics.
//
// Memory:   reads x (and the residual) once; writes y once, to a new tensor or over x. Bound by bandwidth.
// Mapping:  a block has a tile (some channels) and a slice (a share of their values), see plan.h. Slice 0, or
//           one block for all channels, also updates the running statistics and writes `saved` (mean, invstd,
//           count; for backward), but not in bn_apply. Loads and stores of 16 bytes.
// Numerics: arithmetic in float (double for double), see normalize.cuh.
// Source:   Ioffe and Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "launch.cuh"
#include "normalize.cuh"
#include "walk.cuh"

namespace fastvit {

struct BnForwardParams : BnForwardArgs {
  LaunchPlan plan;
  bool has_update_block;  // block 0 writes no y: it updates and saves the statistics of all channels
};

template <class A, class Count>
__device__ __forceinline__ Moments<A, Count> load_moments(const BnForwardArgs& args, int64_t c) {
  const A* const moments = static_cast<const A*>(args.moments);
  const int64_t C = args.layout.channels;
  return {unpack_count<Count>(moments + 2 * C), moments[c], moments[C + c]};
}

// The statistics that normalize channel c: of an earlier forward (bn_apply), of moments, or the running ones.
template <class A>
__device__ __forceinline__ MeanInvstd<A> load_mean_invstd(const BnForwardArgs& args, int64_t c) {
  if (const A* const saved_in = static_cast<const A*>(args.saved_in))
    return {saved_in[c], saved_in[args.layout.channels + c]};
  return args.moments ? MeanInvstd<A>::from_moments(load_moments<A, A>(args, c), args.eps)
                      : MeanInvstd<A>::from_running_stats(args, c);
}

// Updates channel c of the running statistics, if there are moments, and writes mean and invstd to `saved`.
template <class A>
__device__ __forceinline__ void update_and_save(const BnForwardArgs& args, int64_t c, double average_factor) {
  if (args.moments) update_running_stats(args, c, load_moments<A, double>(args, c), average_factor);
  load_mean_invstd<A>(args, c).save(args, c);
}

// Writes the count, a high and a low part, to `saved`, and increments num_batches_tracked. One thread of the
// grid calls it, after the last read of num_batches_tracked. Without moments the statistics are constants,
// whose count is infinite.
template <class A>
__device__ __forceinline__ void write_count(const BnForwardArgs& args) {
  const int64_t C = args.layout.channels;
  const A* const moments = static_cast<const A*>(args.moments);
  A* const count = static_cast<A*>(args.saved) + 2 * C;
  count[0] = moments ? moments[2 * C] : A(INFINITY);
  count[1] = moments ? moments[2 * C + 1] : A(0);
  // A failed exchange between ranks makes the count NaN, which differs from itself. num_batches_tracked does
  // not count that forward.
  if (moments && args.num_batches_tracked && count[0] == count[0]) ++*args.num_batches_tracked;
}

// The work of an update block. A launch has one in two cases: the tensor is empty, so there are no other
// blocks; or momentum is None, so the factor is computed from num_batches_tracked. It must not be
// incremented before its last read, which only the threads of one block can wait for.
template <class A>
__device__ __forceinline__ void update_and_save_all(const BnForwardArgs& args) {
  const double average_factor = args.moments && args.num_batches_tracked && args.cumulative_average
                                    ? 1.0 / double(*args.num_batches_tracked + 1)
                                    : args.momentum;
  for (int64_t c = threadIdx.x; c < args.layout.channels; c += kThreads)
    update_and_save<A>(args, c, average_factor);
  __syncthreads();
  if (threadIdx.x == 0) write_count<A>(args);
}

// T: storage type of x and y. V: elements of a vector, which is 16 bytes or one element.
// kHasResidual: a residual is added before the activation.
// kIsRows: a thread takes V columns of the rows of its slice, with the constants of each; otherwise a block
// walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
template <class T, bool kIsRows, int V, bool kHasResidual>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor + kExtraBlocksOnSm90)
    bn_forward_kernel(const __grid_constant__ KernelParams<BnForwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  if (args.has_update_block && blockIdx.x == 0) return update_and_save_all<A>(args);
  constexpr int kOperands = kHasResidual ? 3 : 2;  // x, y (and the residual)
  // The first block takes the last tile. An update block, which is block 0, takes none.
  const BlockWork work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ ChannelAffine<A> tile_affine[kIsRows ? kMaxTileChannels : 1];
  // Whether this block updates and saves the statistics of its tile.
  const bool is_saving = work.slice == 0 && !args.has_update_block && !args.saved_in;
  for (int tile_channel = threadIdx.x; tile_channel < work.channels(args.plan); tile_channel += kThreads) {
    const int64_t c = work.first_channel(args.plan) + tile_channel;
    tile_affine[tile_channel] = ChannelAffine<A>::load(args, c, load_mean_invstd<A>(args, c));
    if (is_saving) update_and_save<A>(args, c, args.momentum);
  }
  if (is_saving && work.tile == 0 && threadIdx.x == 0) write_count<A>(args);
  __syncthreads();
  ChannelAffine<A> thread_affine[kIsRows ? V : 1];
  load_thread_constants<kIsRows, V>(thread_affine, tile_affine, args.plan, work);

  // If bn_stats ran before, it read the end of x last, and the L2 cache still has it: the walk begins there.
  for_each_batch<kIsRows, V, kMaxBatchVectors, kOperands, WalkOrder::descending>(
      args.plan, work, /*operand0=*/args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], residual[kHasResidual ? B::U : 1];
        batch.template load<kEvictFirst>(x, args.x, ForwardOperandIndex::x);
        if constexpr (kHasResidual)
          batch.template load<kEvictFirst>(residual, args.residual, ForwardOperandIndex::residual);
        normalize_batch<kIsRows, kHasResidual>(args, batch, x, residual, thread_affine);
        batch.store(x, args.y, ForwardOperandIndex::y);
      });
}

void backend::bn_forward(const BnForwardArgs& args) {
  const LaunchContext context(args.device);
  dispatch_storage_type(args.dtype, [&]<class T>() {
    const void* pointers[] = {args.x, args.y, args.residual};
    const auto kernel_of = [&]<bool kIsRows, int V>() {
      return args.residual ? bn_forward_kernel<T, kIsRows, V, true> : bn_forward_kernel<T, kIsRows, V, false>;
    };
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 3 : 2,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .reduced_operands = 0}  // no reduction
                                .plan(make_resident_blocks_query<T>(context, kernel_of));
    const bool is_empty = args.layout.numel() == 0,
               has_update_block = !args.saved_in && (is_empty || args.cumulative_average);
    const int64_t blocks = has_update_block + (is_empty ? 0 : plan.blocks());
    if (blocks == 0) return;
    launch_planned<T>(plan, kernel_of, {blocks, context}, BnForwardParams{{args}, plan, has_update_block});
  });
}

}  // namespace fastvit
