// bn_backward without given sums: bn_reduce's sums and dx in a single launch, with the bits of the two ops,
// for tensors of which a tile (some channels) fits into the shared memory of all multiprocessors.
//
// Memory:   reads x or y, dy (and the residual) once; writes dx (and dresidual) and 2C sums once.
// Mapping:  a block has a tile and a slice (a share of its values), see plan.h, and keeps its inputs in
//           shared memory. Then it takes another tile, if not all fit at once. The blocks of a tile wait for
//           each other, so all must be resident.
// Numerics: as bn_reduce and bn_backward.
// Needs:    an input y (from_output) must come from bn_forward_inplace or bn_forward with invertible=True.
// Source:   Ioffe and Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch_memory.h"
#include "smem_cache.cuh"

namespace fastvit {

template <class A>
struct BnBackwardSingleLaunchParams : BnBackwardArgs {
  LaunchPlan plan;
  SliceResults<GradientSums<A>> slice_results;  // in global memory, until they are merged
};

// A thread walks its values twice: for the sums, and then for dx. The first walk stores what it reads in this
// cache, in shared memory. The second walk loads the same batches, in the same order.
template <class T, int V, GradientVariant kVariant>
class GradientCache {
  static constexpr bool kHasResidual = kVariant == GradientVariant::residual;
  enum CachedOperand { kInput, kDy, kResidual };  // indices in the cache
  SmemCache<T, V, kHasResidual ? 3 : 2> cache;

 public:
  __device__ __forceinline__ explicit GradientCache(unsigned char* bytes) : cache(bytes) {}

  // A batch (type B) is B::U vectors of each operand that a thread has in flight.
  template <class B>
  __device__ __forceinline__ void store(const B& batch, const GradientInputs<T, kVariant, B>& inputs) const {
    cache.store(batch, kInput, inputs.input);
    cache.store(batch, kDy, inputs.dy);
    if constexpr (kHasResidual) cache.store(batch, kResidual, inputs.residual);
  }
  // Returns the inputs of vector j of the current batch. `vector` is batch.vector(j); only its type is used.
  template <class B>
  __device__ __forceinline__ GradientInputs<T, kVariant, B> load(const B& vector, int j) const {
    GradientInputs<T, kVariant, B> inputs;
    cache.load(vector, kInput, inputs.input, j);
    cache.load(vector, kDy, inputs.dy, j);
    if constexpr (kHasResidual) cache.load(vector, kResidual, inputs.residual, j);
    return inputs;
  }
  // Goes to the next batch.
  template <class B>
  __device__ __forceinline__ void advance(const B& batch) {
    cache.advance(batch);
  }
  __device__ __forceinline__ void rewind() { cache.rewind(); }
};

// Vectors of each operand that a thread has in flight, as in bn_reduce.
template <GradientVariant kVariant>
constexpr int kBatchVectors = batch_vectors_of_reduction(kVariant == GradientVariant::residual ? 3 : 2);
// The operands to which a batch has offsets: input, dy, dx (and the residual, dresidual).
template <GradientVariant kVariant>
constexpr int kOperands = kVariant == GradientVariant::residual ? 5 : 3;

// The second walk: writes dx, and dresidual, from the cached inputs. It takes a batch vector by vector.
template <bool kIsRows, class T, int V, GradientVariant kVariant, class A, int kThreadChannels>
__device__ __forceinline__ void write_gradients_from_cache(
    GradientCache<T, V, kVariant>& cache, const BnBackwardSingleLaunchParams<A>& args, const BlockWork& work,
    const GradientConstants<A, kVariant> (&thread_constants)[kThreadChannels],
    const StatisticsCorrection<A>* tile_corrections, A max_abs_xhat) {
  StatisticsCorrection<A> thread_corrections[kThreadChannels];
  load_thread_constants<kIsRows, V>(thread_corrections, tile_corrections, args.plan, work);
  cache.rewind();
  for_each_batch<kIsRows, V, kBatchVectors<kVariant>, kOperands<kVariant>, WalkOrder::descending>(
      args.plan, work, /*operand0=*/args.input, [&]<class B>(const B& batch) {
#pragma unroll
        for (int j = 0; j < B::U; ++j) {
          const auto vector = batch.vector(j);
          auto inputs = cache.load(vector, j);
          write_gradients<kIsRows>(vector, inputs, thread_constants, thread_corrections, args, max_abs_xhat);
        }
        cache.advance(batch);
      });
}

// T: storage type of the tensors. V: elements of a vector of 16 bytes.
// kVariant: dv is computed from x, from x and a residual, or from y.
// kIsRows: a thread takes V columns of the rows of its slice, with constants and sums of each; otherwise a
// block walks planes of one channel. B: type of a batch, B::U vectors of B::V elements. See walk.cuh.
template <class T, bool kIsRows, int V, GradientVariant kVariant>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) bn_backward_single_launch_kernel(
    const __grid_constant__ KernelParams<BnBackwardSingleLaunchParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  constexpr int kThreadChannels = kIsRows ? V : 1, kTileCapacity = kIsRows ? kMaxTileChannels : 1;
  const LaunchPlan& plan = args.plan;
  __shared__ GradientConstants<A, kVariant> tile_constants[kTileCapacity];
  __shared__ StatisticsCorrection<A> tile_corrections[kTileCapacity];  // dx = scale * (dv - correction)
  // Bytes, because a __shared__ array cannot have a constructor. After merge_block, the block's sums of a
  // channel of its tile are block_sums[tile_channel * stride].
  __shared__ __align__(16) unsigned char bytes[kThreads * kThreadChannels * sizeof(GradientSums<A>)];
  GradientSums<A>* block_sums = reinterpret_cast<GradientSums<A>*>(bytes);
  FASTVIT_DYNAMIC_SHARED(cache_bytes);  // declares the launch's dynamic shared memory
  // |xhat| of n values is at most sqrt(n - 1). An xhat that is recovered from a rounded y is clamped to that.
  const A max_abs_xhat = compute_max_abs_xhat<A, kVariant>(args);
  for (BlockWork work(plan, blockIdx.x); work.tile < plan.tiles; work.tile += plan.tiles_at_once) {
    const int64_t first_channel = work.first_channel(plan), C = plan.layout.channels;
    for (int tile_channel = threadIdx.x; tile_channel < work.channels(plan); tile_channel += kThreads)
      tile_constants[tile_channel] = GradientConstants<A, kVariant>::load(args, first_channel + tile_channel);
    __syncthreads();
    GradientCache<T, V, kVariant> cache(cache_bytes);
    KahanSums<A> thread_sums[kThreadChannels];
    GradientConstants<A, kVariant> thread_constants[kThreadChannels];
    load_thread_constants<kIsRows, V>(thread_constants, tile_constants, plan, work);
    // The op that wrote dy usually wrote its end last, and the L2 cache still has it: the walk begins there.
    for_each_batch<kIsRows, V, kBatchVectors<kVariant>, kOperands<kVariant>, WalkOrder::descending>(
        plan, work, /*operand0=*/args.input, [&]<class B>(const B& batch) {
          GradientInputs<T, kVariant, B> inputs;
          inputs.template load<kEvictFirst, /*kResidualOperand=*/BackwardOperandIndex::residual>(batch, args);
          cache.store(batch, inputs);
          force_reload_from_shared();  // frees the registers of the inputs
          accumulate_sums<T, kIsRows>(thread_sums, batch, thread_constants, args, max_abs_xhat,
                                      [&](int j) { return cache.load(batch.vector(j), j); });
          cache.advance(batch);
        });

    const int stride = merge_block(block_sums, thread_sums, plan, work);
    A* const local_sums = static_cast<A*>(args.local_sums);
    merge_slices</*kAllBlocksGetTotals=*/true>(
        block_sums, stride, args.slice_results, plan, work, [&](int64_t c, GradientSums<A> channel_sums) {
          // If the input is x, the second sum is of dv * (x - mean); invstd makes it the sum of dv * xhat.
          if (kVariant != GradientVariant::from_output)
            channel_sums.dv_times_second_factor *= load_saved_invstd<A>(args, c);
          tile_corrections[c - first_channel] =
              StatisticsCorrection<A>::template from_sums<kVariant>(args, c, channel_sums);
          if (work.slice == 0) {
            local_sums[c] = channel_sums.dv;
            local_sums[C + c] = channel_sums.dv_times_second_factor;
          }
        });
    __syncthreads();
    // The constants are read again, so that they take no registers between the walks.
    load_thread_constants<kIsRows, V>(thread_constants, tile_constants, plan, work);
    __syncthreads();  // the next tile's constants overwrite these
    write_gradients_from_cache<kIsRows>(cache, args, work, thread_constants, tile_corrections, max_abs_xhat);
  }
}

// Returns false, without a launch, where a single launch is not possible. The caller then calls bn_reduce and
// bn_backward.
bool backend::bn_backward_single_launch(const BnBackwardArgs& args) {
  if (args.layout.numel() == 0) return false;
  const LaunchContext context(args.device);
  bool is_launched = false;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const int cached_operands = args.residual ? 3 : 2;
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = pointers,
                                          .operands = args.residual ? 5 : 3,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .reduced_operands = cached_operands}  // as in bn_reduce
                                .plan_single_launch();
    if (plan.vectors_in_shared == 0) return;
    const MergeMemory<GradientSums<A>> merge_memory(plan, context);
    const BnBackwardSingleLaunchParams<A> params{{args}, plan, merge_memory.slice_results()};
    dispatch_vector_kernel<T>(plan, [&]<bool kIsRows, int V>() {
      const auto kernel = dispatch_gradient_variant(args, [&]<GradientVariant kVariant>() {
        return bn_backward_single_launch_kernel<T, kIsRows, V, kVariant>;
      });
      is_launched = try_single_launch(kernel, plan, cached_operands, context, params);
    });
  });
  return is_launched;
}

}  // namespace fastvit
