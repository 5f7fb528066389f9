// bn_reduce, abn_reduce: sum dz and sum dz*xhat per channel; dz is the gradient before the activation.
// Memory   reads x or y, dy (and z) once; writes 2C numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics fp32 accumulation (fp64 for double), compensated, in a fixed order, no float atomics. From x the
//          second sum is of dz*(x - mean), multiplied by invstd at the end.
// Needs    in place: gamma != 0 (its floor sees to it) and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "block_reduce.cuh"
#include "gradient.cuh"
#include "host.h"

namespace fastvit {

template <class T>
struct ReduceKernel {
  using A = Accumulation<T>;
  Plan plan;
  const T* input;
  const T* dy;
  const T* z;
  Saved<A> saved;
  A* sums;
  Sums<A>* partial;
  unsigned* tickets;
};

// Operands 0: x or y, 1: dy, 2: z.
template <class T, bool kRows, int V, Kept kKept>
__global__ void __launch_bounds__(kThreads, kResident)
    reduce_kernel(const __grid_constant__ ReduceKernel<T> args) {
  using A = Accumulation<T>;
  constexpr bool kResidual = kKept == Kept::input_and_residual;
  constexpr int kOperands = kResidual ? 3 : 2, K = kRows ? V : 1, kTile = kRows ? kMostTile : 1;
  constexpr int U = kResidual ? kBatch / 2 : kBatch;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ Constants<A, kKept> table[kTile];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads)
    table[g] = Constants<A, kKept>::of(args.saved, work.first_channel(args.plan) + g);
  __syncthreads();
  Constants<A, kKept> constants[K];
#pragma unroll
  for (int k = 0; k < K; ++k) constants[k] = table[kRows ? work.channel<V>(args.plan, k) : 0];
  const A limit = kKept == Kept::output ? args.saved.limit() : A(0);

  RunningSums<A> running[K];
  const auto body = [&]<class B>(const B& batch) {
    Packet<T, B::V> input[B::U], dy[B::U];
    [[maybe_unused]] Packet<T, B::V> z[kResidual ? B::U : 1];
    batch.load(input, args.input, 0);
    batch.load(dy, args.dy, 1);
    if constexpr (kResidual) batch.load(z, args.z, 2);
    with_activation<kKept != Kept::output>(args.saved.activation, [&]<class Fn>(Fn) {
      Sums<A> sums[K];
#pragma unroll
      for (int j = 0; j < B::U; ++j) {
        A in[B::V], g[B::V];
        [[maybe_unused]] A r[B::V];
        input[j].unpack(in);
        dy[j].unpack(g);
        if constexpr (kResidual) z[j].unpack(r);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {  // what does not exist has dy = 0 and adds nothing
          const Gradient<A> t = gradient<Fn, kKept>(in[k], g[k], kResidual ? r[k] : A(0),
                                                    constants[kRows ? k : 0], args.saved.param, limit);
          sums[kRows ? k : 0].merge({t.dz, t.dz * t.centred});
        }
      }
#pragma unroll
      for (int k = 0; k < K; ++k) running[k].add(sums[k]);
    });
  };
  if constexpr (kRows)
    walk_rows<V, U, kOperands, true>(args.plan, work, body);
  else
    walk_planes<V, U, kOperands, true>(args.plan, work, args.input, body);

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Sums<A>)];
  Sums<A>* shared = reinterpret_cast<Sums<A>*>(bytes);
  Sums<A> sums[K];
#pragma unroll
  for (int k = 0; k < K; ++k) sums[k] = running[k].sums;
  const int step = merge_block(shared, sums, args.plan, work);
  const int64_t C = args.plan.layout.C;
  finish(shared, step, args.partial, args.tickets, args.plan, work, [&](int64_t c, const Sums<A>& total) {
    args.sums[c] = total.first;
    args.sums[C + c] = kKept == Kept::output ? total.second : total.second * args.saved.invstd(c);
  });
}

void Cuda::reduce(const ReduceArgs& args) {
  const Device device(args.device);
  if (args.layout.C == 0) return;
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.z};
    const Plan plan =
        Planner::make(args.layout, pointers, args.z ? 3 : 2, sizeof(T), device.multiprocessors, true);
    const Slices<Sums<A>> slices(plan, device);
    const ReduceKernel<T> kernel{plan,
                                 static_cast<const T*>(args.input),
                                 static_cast<const T*>(args.dy),
                                 static_cast<const T*>(args.z),
                                 saved_of<A>(args),
                                 static_cast<A*>(args.sums),
                                 slices.partial(),
                                 slices.tickets};
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      with_kept(args, [&]<Kept kKept>() {
        STD_CUDA_CHECK(launch(reduce_kernel<T, kRows, V, kKept>, plan.blocks(), device.stream, kernel));
      });
    });
  });
}

}  // namespace fastvit
