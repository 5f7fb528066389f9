// bn_forward, bn_forward_inplace, bn_apply: y = act((x - mean) * scale + beta (+ residual)),
// scale = gamma * invstd; the running statistics are updated in the same launch.
// Memory   reads x (and residual) once, writes y once, over x or to a new tensor. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; that of slice 0 updates running
//          statistics and writes `saved`. 16-byte loads and stores, a batch in flight.
// Numerics fp32 arithmetic (fp64 for double), see normalize.cuh.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "launch.cuh"
#include "normalize.cuh"
#include "walk.cuh"

namespace fastvit {

struct BnForwardParams : BnForwardArgs {
  LaunchPlan plan;
  bool has_update_block;  // block 0 updates and saves for all channels, and normalises nothing
};

template <class A, class Count>
__device__ __forceinline__ Moments<A, Count> load_moments(const BnForwardArgs& args, int64_t c) {
  const A* const moments = static_cast<const A*>(args.moments);
  const int64_t C = args.layout.channels;
  return {unpack_count<Count>(moments + 2 * C), moments[c], moments[C + c]};
}

template <class A>
__device__ __forceinline__ MeanInvstd<A> mean_invstd_of(const BnForwardArgs& args, int64_t c) {
  if (const A* const saved_in = static_cast<const A*>(args.saved_in))
    return {saved_in[c], saved_in[args.layout.channels + c]};
  return args.moments ? MeanInvstd<A>::from_moments(load_moments<A, A>(args, c), args.eps)
                      : MeanInvstd<A>::from_running_stats(args, c);
}

// Updates and saves one channel.
template <class A>
__device__ __forceinline__ void update_and_save(const BnForwardArgs& args, int64_t c, double factor) {
  if (args.moments) update_running(args, c, load_moments<A, double>(args, c), factor);
  mean_invstd_of<A>(args, c).save(args, c);
}

// Once per launch, after all that reads the counter.
template <class A>
__device__ __forceinline__ void write_count(const BnForwardArgs& args) {
  const int64_t C = args.layout.channels;
  const A* const moments = static_cast<const A*>(args.moments);
  A* const count = static_cast<A*>(args.saved) + 2 * C;
  count[0] = moments ? moments[2 * C] : A(INFINITY);
  count[1] = moments ? moments[2 * C + 1] : A(0);
  if (moments && args.num_batches_tracked && count[0] == count[0])  // no update for NaN
    ++*args.num_batches_tracked;
}

// An extra block does this for all channels where the factor comes from the counter, which must be counted up
// after it was read, or where the tensor is empty.
template <class A>
__device__ __forceinline__ void update_and_save_all(const BnForwardArgs& args) {
  const double factor = args.moments && args.num_batches_tracked && args.cumulative_average
                            ? 1.0 / double(*args.num_batches_tracked + 1)
                            : args.momentum;
  for (int64_t c = threadIdx.x; c < args.layout.channels; c += kThreads) update_and_save<A>(args, c, factor);
  __syncthreads();
  if (threadIdx.x == 0) write_count<A>(args);
}

template <class T, bool kIsRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor + kOneMoreBlockOnSm90)
    bn_forward_kernel(const __grid_constant__ KernelParams<BnForwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  if (args.has_update_block && blockIdx.x == 0) return update_and_save_all<A>(args);
  constexpr int kOperands = kResidual ? 3 : 2;
  const BlockWork work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ ChannelAffine<A> table[kIsRows ? kMaxTile : 1];
  const bool updates = work.slice == 0 && !args.has_update_block && !args.saved_in;
  for (int g = threadIdx.x; g < work.channels(args.plan); g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = ChannelAffine<A>::of(args, c, mean_invstd_of<A>(args, c));
    if (updates) update_and_save<A>(args, c, args.momentum);
  }
  if (updates && work.tile == 0 && threadIdx.x == 0) write_count<A>(args);
  __syncthreads();
  ChannelAffine<A> affine[kIsRows ? V : 1];
  load_thread_constants<kIsRows, V>(affine, table, args.plan, work);

  for_each_batch<kIsRows, V, kBatch, kOperands, WalkOrder::descending>(
      args.plan, work, args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], residual[kResidual ? B::U : 1];
        batch.template load<kEvictFirst>(x, args.x, ForwardStrides::x);
        if constexpr (kResidual)
          batch.template load<kEvictFirst>(residual, args.residual, ForwardStrides::residual);
        normalize_batch<kIsRows, kResidual>(args, batch, x, residual, affine);
        batch.store(x, args.y, ForwardStrides::y);
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
                                          .merged_operands = 0}
                                .plan(resident_blocks<T>(context, kernel_of));
    const bool empty = args.layout.numel() == 0,
               has_update_block = !args.saved_in && (empty || args.cumulative_average);
    const int64_t blocks = has_update_block + (empty ? 0 : plan.blocks());
    if (blocks == 0) return;
    launch_planned<T>(plan, kernel_of, {blocks, context}, BnForwardParams{{args}, plan, has_update_block});
  });
}

}  // namespace fastvit
