// bn_forward, bn_apply, abn_forward_: y = act((x - mean) * scale + beta (+ z)), scale = gamma * invstd; the
// ranks' moments are merged and the running statistics updated in the same launch.
// Memory   reads x (and z) once, writes y once, over x or to a tensor of its own. Bandwidth-bound.
// Mapping  block 0 keeps the books (saved, running statistics, counter) for all channels; the others take
//          (tile of channels, slice of their values), see plan.h, and merge the moments of their tile
//          themselves. 16-byte loads and stores, a batch in flight.
// Numerics fp32 arithmetic (fp64 for double), see normalise.cuh.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "host.h"
#include "normalise.cuh"
#include "peer.cuh"

namespace fastvit {

template <class A>
struct Statistics : Books<A> {  // what mean and invstd come from, and where they are kept
  const A* moments;             // [ranks][2C + 2]; null: the running statistics
  int64_t ranks;
  const A* given;     // [2C + 2] of an earlier forward, or null; then there is nothing to keep
  Exchange exchange;  // of world > 0: the ranks' messages in place of `moments`
};

// The statistics as one block sees them. All its threads make it together, and wait for the ranks' headers.
template <class A>
class Reader {
  const Statistics<A>& from;
  const Poll poll;
  double* const counts;  // [ranks], in shared memory: of the messages
  bool there = true;     // the exchange has not failed

  __device__ __forceinline__ double count(int64_t rank) const {
    return poll ? counts[rank] : load_count(from.moments + rank * (2 * from.C + 2) + 2 * from.C);
  }
  __device__ __forceinline__ Moments<A> merged(int64_t c) const {  // in rank order
    Moments<A> all;
    for (int64_t r = 0; r < from.ranks; ++r) {
      const A* row = from.moments + r * (2 * from.C + 2);
      A mean, m2;
      if (poll)
        poll.pair(int(r), c, mean, m2);
      else
        mean = row[c], m2 = row[from.C + c];
      all.merge(count(r), mean, m2);
    }
    return all;
  }
  __device__ __forceinline__ bool all_arrived() const {
    bool failed = !there;
    for (int64_t c = threadIdx.x; c < from.C && !failed; c += kThreads)
      for (int64_t r = 0; r < from.ranks && !failed; ++r) {
        A mean, m2;
        failed = !poll.pair(int(r), c, mean, m2);
      }
    if (__syncthreads_or(failed)) return false;
    const bool refused = threadIdx.x == 0 && !poll.done();
    return !__syncthreads_or(refused);
  }

 public:
  __device__ __forceinline__ Reader(const Statistics<A>& from, double* counts)
      : from(from), poll(from.exchange), counts(counts) {
    if (!poll) return;
    bool failed = false;
    if (const int rank = int(threadIdx.x); rank < from.ranks) {
      A two[2] = {};
      failed = !poll.header(rank) || !poll.pair(rank, from.C, two[0], two[1]);
      counts[rank] = load_count(two);
    }
    there = !__syncthreads_or(failed);
  }

  __device__ __forceinline__ Normaliser<A> of(int64_t c) const {
    if (from.given) return {from.given[c], from.given[from.C + c]};
    if (!from.moments) return from.running(c);
    return there ? from.normaliser(merged(c)) : Normaliser<A>{A(NAN), A(NAN)};
  }

  // By one block for all channels: the factor comes from a counter that must change exactly once, after
  // everybody has read it. After an exchange that failed nothing is kept.
  __device__ __forceinline__ void keep() const {
    if (from.given) return;
    const int64_t C = from.C;
    int64_t* const tracked = from.num_batches_tracked;
    double count = 0, factor = from.momentum;
    const bool good = !poll || all_arrived();
    if (from.moments) {
      for (int64_t r = 0; r < from.ranks; ++r) count += this->count(r);
      if (tracked && from.cumulative) factor = 1.0 / double(*tracked + 1);
    }
    for (int64_t c = threadIdx.x; c < C; c += kThreads) {
      if (!good) {
        from.save(c, {A(NAN), A(NAN)});
      } else if (from.moments) {
        const Moments<A> all = merged(c);
        from.update(c, all, factor);
        from.save(c, from.normaliser(all));
      } else {
        from.save(c, from.running(c));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (!good) {
        from.saved[2 * C] = from.saved[2 * C + 1] = A(NAN);
      } else if (from.moments) {
        store_count(from.saved + 2 * C, count);
        if (tracked) ++*tracked;
      } else {
        from.saved[2 * C] = A(INFINITY);
        from.saved[2 * C + 1] = 0;
      }
      if (poll) poll.close();
    }
  }
};

template <class T>
struct ForwardKernel {
  using A = Accumulation<T>;
  Plan plan;
  const T* x;
  T* y;
  const T* z;
  Statistics<A> statistics;
  Activated<T> act;
};

// Operands 0: x, 1: y, 2: z.
template <class T, bool kRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResident)
    forward_kernel(const __grid_constant__ ForwardKernel<T> args) {
  using A = Accumulation<T>;
  __shared__ double counts[peer::kMostRanks];
  const Reader<A> statistics(args.statistics, counts);
  if (blockIdx.x == 0) {
    statistics.keep();
    return;
  }
  constexpr int kOperands = kResidual ? 3 : 2;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ Affine<A> table[kRows ? kMostTile : 1];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = args.act.affine(c, statistics.of(c));
  }
  __syncthreads();
  Affine<A> affine[kRows ? V : 1];
  pick<kRows, V>(affine, table, args.plan, work);

  walk<kRows, V, kBatch, kOperands, true>(args.plan, work, args.x, [&]<class B>(const B& batch) {
    Packet<T, B::V> x[B::U], z[kResidual ? B::U : 1];
    batch.load(x, args.x, 0);
    if constexpr (kResidual) batch.load(z, args.z, 2);
    args.act.template apply<kRows, kResidual>(batch, x, z, affine);
    batch.store(x, args.y, 1);
  });
}

void Cuda::forward(const ForwardArgs& args) {
  const Device device(args.device);
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.z};
    const Plan plan = Planner::make(args.layout, pointers, args.z ? 3 : 2, sizeof(T), device.limits);
    const ForwardKernel<T> kernel{plan,
                                  static_cast<const T*>(args.x),
                                  static_cast<T*>(args.y),
                                  static_cast<const T*>(args.z),
                                  {books_of<A>(args), static_cast<const A*>(args.moments), args.ranks,
                                   static_cast<const A*>(args.given), args.exchange},
                                  activated_of<T>(args)};
    const int64_t blocks = 1 + (args.layout.numel() > 0 ? plan.blocks() : 0);
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      if (args.z)
        STD_CUDA_CHECK(launch(forward_kernel<T, kRows, V, true>, {blocks, device.stream}, kernel));
      else
        STD_CUDA_CHECK(launch(forward_kernel<T, kRows, V, false>, {blocks, device.stream}, kernel));
    });
  });
}

}  // namespace fastvit
