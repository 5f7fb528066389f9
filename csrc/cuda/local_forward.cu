// bn_forward and abn_forward_ without moments: bn_stats and the op in one launch, for tensors
// that fit on chip; the same bits as the two ops.
// Memory   reads x (and z) once, writes y once, over x or to a new tensor.
// Mapping  block = (tile of channels, slice of their values), see plan.h; a block holds its values in shared
//          memory. The slices' blocks wait for each other, tile by tile, so all must be resident.
// Numerics as bn_stats and bn_forward.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "backend.h"
#include "normalise.cuh"
#include "scratch.h"
#include "smem_cache.cuh"
#include "stats.cuh"

namespace fastvit {

template <class T>
struct LocalForwardParams {
  using A = Accumulation<T>;
  Plan plan;
  const T* x;
  T* y;
  const T* z;
  double count;
  RunningStats<A> running;
  Activated<T> act;
  Partials<WelfordState<A>> partials;
};

// Operands 0: x, 1: y, 2: z.
template <class T, Activations kSet, bool kRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResident)
    local_forward_kernel(const __grid_constant__ Launched<LocalForwardParams<T>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  using Mine = ThreadStats<T, kRows, V>;
  constexpr int kOperands = kResidual ? 3 : 2;
  const Plan& plan = args.plan;
  const Work work(plan, blockIdx.x);
  FASTVIT_DYNAMIC_SHARED(memory);
  SmemCache<T, V, 1> cache(memory);
  Mine mine(plan, work, args.x);
  walk<kRows, V, kBatch, kOperands, false, true>(plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U];
    batch.template load<kLast>(x, args.x, 0);
    cache.put(batch, 0, x);
    cache.next(batch);
    mine.add(batch, x);
  });

  // Pivots are read before the blocks wait for each other; afterwards another block may overwrite them.
  __shared__ A pivots[Mine::kTile];
  __shared__ Affine<A> table[Mine::kTile];
  const int64_t first = work.first_channel(plan);
  __shared__ __align__(16) unsigned char bytes[kThreads * Mine::K * sizeof(WelfordState<A>)];
  WelfordState<A>* shared = reinterpret_cast<WelfordState<A>*>(bytes);
  mine.end(pivots, plan, work);
  const int step = merge_block(shared, mine.spread, plan, work);
  finish<true>(shared, step, args.partials, plan, work, [&](int64_t c, const WelfordState<A>& total) {
    Moments<A> all;
    all.merge(args.count, pivots[c - first] + total.mean, total.m2);
    const Normaliser<A> n = args.running.normaliser(all);
    table[c - first] = args.act.affine(c, n);
    if (work.slice == 0) {
      args.running.update(c, all, args.running.momentum);
      args.running.save(c, n);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_count(args.running.saved + 2 * args.running.C, args.count);
    if (args.running.num_batches_tracked) ++*args.running.num_batches_tracked;
  }
  __syncthreads();

  Affine<A> affine[kRows ? V : 1];
  pick<kRows, V>(affine, table, plan, work);
  cache.rewind();
  walk<kRows, V, kBatch, kOperands, false>(plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U], z[kResidual ? B::U : 1];
    if constexpr (kResidual) batch.template load<kLast>(z, args.z, 2);
    cache.get(batch, 0, x);
    cache.next(batch);
    args.act.template apply<kSet, kRows, kResidual>(batch, x, z, affine);
    batch.store(x, args.y, 1);
  });
}

bool Cuda::local_forward(const ForwardArgs& args) {
  // The counter of a cumulative average is incremented after every block has read it.
  if (args.layout.numel() == 0 || args.cumulative) return false;
  const Device device(args.device);
  bool done = false;
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.z};
    const Plan plan = Planner{args.layout, pointers, args.z ? 3 : 2, sizeof(T), device.limits, 1}.on_chip();
    if (plan.cached_vectors == 0) return;
    const Slices<WelfordState<A>> slices(plan, device);
    const LocalForwardParams<T> kernel{plan,
                                       static_cast<const T*>(args.x),
                                       static_cast<T*>(args.y),
                                       static_cast<const T*>(args.z),
                                       double(args.layout.count()),
                                       running_stats_of<A>(args),
                                       activated_of<T>(args),
                                       slices.partials()};
    with_vector_walk<T>(plan, [&]<bool kRows, int V>() {
      with_activations<T, V>(args.activation, [&]<Activations kSet>() {
        done = args.z
                   ? launch_on_chip<local_forward_kernel<T, kSet, kRows, V, true>>(plan, 1, device, kernel)
                   : launch_on_chip<local_forward_kernel<T, kSet, kRows, V, false>>(plan, 1, device, kernel);
      });
    });
  });
  return done;
}

}  // namespace fastvit
