// bn_forward, bn_apply, abn_forward_: y = act((x - mean) * scale + beta (+ z)), scale = gamma * invstd; the
// running statistics are updated in the same launch.
// Memory   reads x (and z) once, writes y once, over x or to a new tensor. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; that of slice 0 updates running
//          statistics and writes `saved`. 16-byte loads and stores, a batch in flight.
// Numerics fp32 arithmetic (fp64 for double), see normalise.cuh.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "backend.h"
#include "launch.cuh"
#include "normalise.cuh"
#include "walk.cuh"

namespace fastvit {

template <class A>
struct Statistics : RunningStats<A> {  // the sources of mean and invstd
  const A* moments;                    // [2C + 2]; null: the running statistics
  const A* applied;  // [2C + 2]: `saved` of an earlier forward, then nothing is updated or saved; or null

  template <class Count>
  __device__ __forceinline__ Moments<A, Count> measured(int64_t c) const {
    return {load_count<Count>(moments + 2 * this->C), moments[c], moments[this->C + c]};
  }
  __device__ __forceinline__ Normaliser<A> of(int64_t c) const {
    if (applied) return {applied[c], applied[this->C + c]};
    return moments ? this->normaliser(measured<A>(c)) : this->running(c);
  }

  // Updates and saves one channel.
  __device__ __forceinline__ void record(int64_t c, double factor) const {
    if (moments) this->update(c, measured<double>(c), factor);
    this->save(c, of(c));
  }
  // Once per launch, after all that reads the counter.
  __device__ __forceinline__ void count_batch() const {
    const int64_t C = this->C;
    int64_t* const tracked = this->num_batches_tracked;
    A* const count = this->saved + 2 * C;
    count[0] = moments ? moments[2 * C] : A(INFINITY);
    count[1] = moments ? moments[2 * C + 1] : A(0);
    if (moments && tracked && count[0] == count[0]) ++*tracked;  // no update for NaN
  }
  // A block of its own does this for all channels where a factor comes from the counter, which is counted up
  // after it was read, or where nothing else is to be done.
  __device__ __forceinline__ void record_all() const {
    const double factor = moments && this->num_batches_tracked && this->cumulative
                              ? 1.0 / double(*this->num_batches_tracked + 1)
                              : this->momentum;
    for (int64_t c = threadIdx.x; c < this->C; c += kThreads) record(c, factor);
    __syncthreads();
    if (threadIdx.x == 0) count_batch();
  }
};

template <class T>
struct ForwardParams {
  using A = Accumulation<T>;
  Plan plan;
  const T* x;
  T* y;
  const T* z;
  Statistics<A> statistics;
  Activated<T> act;
  bool apart;  // block 0 updates and saves for all channels
};

// Operands 0: x, 1: y, 2: z.
template <class T, Activations kSet, bool kRows, int V, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResident)
    forward_kernel(const __grid_constant__ Launched<ForwardParams<T>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  if (args.apart && blockIdx.x == 0) {
    args.statistics.record_all();
    return;
  }
  constexpr int kOperands = kResidual ? 3 : 2;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  prefetch_first<kRows, V, kBatch, kOperands, true, kResidual ? 2 : 0, T>(args.plan, work, args.x, nullptr,
                                                                          args.z);
  __shared__ Affine<A> table[kRows ? kMostTile : 1];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = args.act.affine(c, args.statistics.of(c));
    if (work.slice == 0 && !args.apart && !args.statistics.applied)
      args.statistics.record(c, args.statistics.momentum);
  }
  if (work.slice == 0 && work.tile == 0 && threadIdx.x == 0 && !args.apart && !args.statistics.applied)
    args.statistics.count_batch();
  __syncthreads();
  Affine<A> affine[kRows ? V : 1];
  pick<kRows, V>(affine, table, args.plan, work);

  walk<kRows, V, kBatch, kOperands, true>(args.plan, work, args.x, [&]<class B>(const B& batch) {
    Vector<T, B::V> x[B::U], z[kResidual ? B::U : 1];
    batch.template load<kLast>(x, args.x, 0);
    if constexpr (kResidual) batch.template load<kLast>(z, args.z, 2);
    args.act.template apply<kSet, kRows, kResidual>(batch, x, z, affine);
    batch.store(x, args.y, 1);
  });
}

// Selects the compiled kernel for these arguments.
template <class T, bool kRows, int V>
auto forward_kernel_of(const ForwardArgs& args) {
  void (*kernel)(Launched<ForwardParams<T>>) = nullptr;
  with_activations<T, V>(args.activation, [&]<Activations kSet>() {
    kernel = args.z ? forward_kernel<T, kSet, kRows, V, true> : forward_kernel<T, kSet, kRows, V, false>;
  });
  return kernel;
}

void Cuda::forward(const ForwardArgs& args) {
  const Device device(args.device);
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.x, args.y, args.z};
    const auto kernel_of = [&]<bool kRows, int V>() { return forward_kernel_of<T, kRows, V>(args); };
    const Plan plan = Planner{args.layout, pointers, args.z ? 3 : 2, sizeof(T), device.limits, 0}.plan(
        resident_blocks<T>(device, kernel_of));
    const bool empty = args.layout.numel() == 0, apart = !args.applied && (empty || args.cumulative);
    const ForwardParams<T> params{
        plan,
        static_cast<const T*>(args.x),
        static_cast<T*>(args.y),
        static_cast<const T*>(args.z),
        {running_stats_of<A>(args), static_cast<const A*>(args.moments), static_cast<const A*>(args.applied)},
        activated_of<T>(args),
        apart};
    const int64_t blocks = apart + (empty ? 0 : plan.blocks());
    if (blocks == 0) return;
    launch_planned<T>(plan, kernel_of, {blocks, device}, params);
  });
}

}  // namespace fastvit
