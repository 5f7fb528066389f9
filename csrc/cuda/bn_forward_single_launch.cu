// bn_forward and bn_forward_inplace without moments: bn_stats and the op in one launch, for tensors that fit
// on chip; the same bits as the two ops.
// Memory   reads x (and residual) once, writes y once, over x or to a new tensor.
// Mapping  block = (tile of channels, slice of their values), see plan.h; a block holds its values in shared
//          memory. The slices' blocks wait for each other, tile by tile, so all must be resident.
// Numerics as bn_stats and bn_forward.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "normalize.cuh"
#include "launch_memory.h"
#include "smem_cache.cuh"
#include "chunked_moments.cuh"

namespace fastvit {

template <class A>
struct OnChipForwardParams : Planned<BnForwardArgs> {
  Partials<PartialMoments<A>> partials;
};

template <class T, bool kRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResident)
    on_chip_forward_kernel(const __grid_constant__ Launched<OnChipForwardParams<Accumulation<T>>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  using Mine = ThreadStats<T, kRows, V>;
  constexpr int kOperands = kResidual ? 3 : 2;
  const Plan& plan = args.plan;
  const Work work(plan, blockIdx.x);
  FASTVIT_DYNAMIC_SHARED(memory);
  SmemCache<T, V, 1> cache(memory);
  Mine mine(plan, work, args.x);
  walk<kRows, V, kBatch, kOperands, false>(plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U];
    batch.template load<kStreaming>(x, args.x, ForwardOperand::x);
    cache.put(batch, 0, x);
    cache.next(batch);
    mine.add(batch, x);
  });

  // Pivots are read before the blocks wait for each other; afterwards another block may overwrite them.
  __shared__ A pivots[Mine::kTile];
  __shared__ Affine<A> table[Mine::kTile];
  const int64_t first = work.first_channel(plan);
  __shared__ __align__(16) unsigned char bytes[kThreads * Mine::K * sizeof(PartialMoments<A>)];
  PartialMoments<A>* shared = reinterpret_cast<PartialMoments<A>*>(bytes);
  mine.end(pivots, plan, work);
  const int stride = merge_block(shared, mine.moments, plan, work);
  const double count = args.layout.count();
  finish<true>(shared, stride, args.partials, plan, work, [&](int64_t c, const PartialMoments<A>& total) {
    const Moments<A> all{count, pivots[c - first] + total.mean, total.m2};
    const auto n = Normaliser<A>::of(all, args.eps);
    table[c - first] = Affine<A>::of(args, c, n);
    if (work.slice == 0) {
      update_running(args, c, all, args.momentum);
      n.save(args, c);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_count(static_cast<A*>(args.saved) + 2 * args.layout.C, count);
    if (args.num_batches_tracked) ++*args.num_batches_tracked;
  }
  __syncthreads();

  Affine<A> affine[kRows ? V : 1];
  pick<kRows, V>(affine, table, plan, work);
  cache.rewind();
  walk<kRows, V, kBatch, kOperands, false>(plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U], residual[kResidual ? B::U : 1];
    if constexpr (kResidual)
      batch.template load<kStreaming>(residual, args.residual, ForwardOperand::residual);
    cache.get(batch, 0, x);
    cache.next(batch);
    apply<kRows, kResidual>(args, batch, x, residual, affine);
    batch.store(x, args.y, ForwardOperand::y);
  });
}

bool backend::bn_forward_on_chip(const BnForwardArgs& args) {
  // The counter of a cumulative average is incremented after every block has read it.
  if (args.layout.numel() == 0 || args.cumulative) return false;
  const Device device(args.device);
  bool done = false;
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.residual};
    const Plan plan =
        Planner{args.layout, pointers, args.residual ? 3 : 2, sizeof(T), device.limits, 1}.on_chip();
    if (plan.cached_vectors == 0) return;
    const Slices<PartialMoments<A>> slices(plan, device);
    const OnChipForwardParams<A> params{{args, plan}, slices.partials()};
    dispatch_vector_walk<T>(plan, [&]<bool kRows, int V>() {
      const auto kernel = args.residual ? on_chip_forward_kernel<T, kRows, V, true>
                                        : on_chip_forward_kernel<T, kRows, V, false>;
      done = launch_on_chip(kernel, plan, 1, device, params);
    });
  });
  return done;
}

}  // namespace fastvit
