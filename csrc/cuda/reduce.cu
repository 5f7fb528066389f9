// bn_reduce, abn_reduce: sum dz and sum dz*xhat per channel; dz is the gradient before the activation. With
// an exchange a second row has the sums over all ranks.
// Memory   reads x or y, dy (and z) once; writes 2C numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics fp32 accumulation (fp64 for double), compensated, in a fixed order, no float atomics. From x the
//          second sum is of dz*(x - mean), multiplied by invstd at the end.
// Needs    in place: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "backend.h"
#include "gradient.cuh"
#include "launch.cuh"
#include "peer.cuh"
#include "scratch.h"

namespace fastvit {

template <class T, bool kShared>
struct ReduceParams : Shares<kShared> {
  using A = Accumulation<T>;
  Plan plan;
  const T* input;
  const T* dy;
  const T* z;
  Saved<A> saved;
  A* sums;
  Partials<Sums<A>> partials;
  unsigned* exchange_words;
};

// Operands 0: x or y, 1: dy, 2: z.
template <class T, bool kShared, Activations kSet, bool kRows, int V, Source kSource>
__global__ void __launch_bounds__(kThreads, kResident)
    reduce_kernel(const __grid_constant__ Launched<ReduceParams<T, kShared>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  constexpr bool kResidual = kSource == Source::input_and_residual;
  constexpr int kOperands = kResidual ? 3 : 2, U = kResidual ? kBatch / 2 : kBatch, K = kRows ? V : 1;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  prefetch_first<kRows, V, U, kOperands, true, kResidual ? 2 : 0>(args.plan, work, args.input, args.dy,
                                                                  args.z);
  __shared__ Constants<A, kSource> table[kRows ? kMostTile : 1];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads)
    table[g] = Constants<A, kSource>::of(args.saved, work.first_channel(args.plan) + g);
  __syncthreads();
  Constants<A, kSource> constants[K];
  pick<kRows, V>(constants, table, args.plan, work);
  const A limit = kSource == Source::output ? args.saved.limit() : A(0);

  RunningSums<A> running[K];
  walk<kRows, V, U, kOperands, true>(args.plan, work, args.input, [&]<class B>(const B& batch) {
    Read<T, kSource, B> read;
    read.template load<kAgain, 2>(batch, args);
    add_gradients<T, kSet, kRows>(running, batch, constants, args.saved, limit,
                                  [&](int j) { return read.vector(j); });
  });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Sums<A>)];
  Sums<A>* shared = reinterpret_cast<Sums<A>*>(bytes);
  const int step = merge_block(shared, running, args.plan, work);
  const int64_t C = args.plan.layout.C;
  const auto write = [&](int64_t c, const Sums<A>& total, const auto& send) {
    const A second = kSource == Source::output ? total.second : total.second * args.saved.invstd(c);
    args.sums[c] = total.first;
    args.sums[C + c] = second;
    send(c, total.first, second);
  };
  if constexpr (kShared) {
    const Push<A> push(args.exchange);
    push.header();
    if (finish(shared, step, args.partials, args.plan, work, [&](int64_t c, const Sums<A>& total) {
          write(c, total, [&](int64_t i, A first, A second) { push.pair(i, first, second); });
        }))
      with_part(args.plan, args.most_parts, args.exchange_words,
                [&](const Part& part) { end_sums(args.exchange, part, args.sums + 2 * C, C); });
  } else {
    finish(shared, step, args.partials, args.plan, work,
           [&](int64_t c, const Sums<A>& total) { write(c, total, [](int64_t, A, A) {}); });
  }
}

// Selects the compiled kernel for these arguments.
template <class T, bool kShared, bool kRows, int V>
auto reduce_kernel_of(const ReduceArgs& args) {
  void (*kernel)(Launched<ReduceParams<T, kShared>>) = nullptr;
  with_activations<T, V>(args.activation, [&]<Activations kSet>() {
    with_source(args, [&]<Source kSource>() { kernel = reduce_kernel<T, kShared, kSet, kRows, V, kSource>; });
  });
  return kernel;
}

void Cuda::reduce(const ReduceArgs& args) {
  const Device device(args.device);
  if (args.layout.C == 0) return;
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.z};
    const int operands = args.z ? 3 : 2;
    with_shares<A>(args, device.limits, [&]<bool kShared>(const Shares<kShared>& shares) {
      const auto kernel_of = [&]<bool kRows, int V>() {
        return reduce_kernel_of<T, kShared, kRows, V>(args);
      };
      const Plan plan = Planner{args.layout, pointers, operands, sizeof(T), device.limits, operands}.plan(
          resident_blocks<T>(device, kernel_of));
      const Slices<Sums<A>> slices(plan, device, kShared);
      const ReduceParams<T, kShared> params{shares,
                                            plan,
                                            static_cast<const T*>(args.input),
                                            static_cast<const T*>(args.dy),
                                            static_cast<const T*>(args.z),
                                            saved_of<A>(args),
                                            static_cast<A*>(args.sums),
                                            slices.partials(),
                                            slices.exchange_words};
      launch_planned<T>(plan, kernel_of, {plan.blocks(), device}, params);
    });
  });
}

}  // namespace fastvit
