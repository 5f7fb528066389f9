// bn_backward, abn_backward: dx = scale * (dz - a - b * (x - mean)), in place scale * (dz - a - b * xhat),
// scale = gamma * invstd, with a and b from the sums over all ranks; dz is written too when a residual was
// added.
// Memory   reads x or y, dy (and z) once; writes dx (and dz) once. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads and stores, a batch
//          in flight.
// Numerics fp32 arithmetic (fp64 for double).
// Needs    in place: gamma != 0 (its floor sees to it) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "gradient.cuh"
#include "host.h"

namespace fastvit {

template <class T>
struct BackwardKernel {
  using A = Accumulation<T>;
  Plan plan;
  const T* input;
  const T* dy;
  T* dx;
  const T* z;
  T* dz;
  Saved<A> saved;
  const A* sums;  // null: the statistics were constants
};

// Operands 0: x or y, 1: dy, 2: dx, 3: z, 4: dz.
template <class T, bool kRows, int V, Kept kKept>
__global__ void __launch_bounds__(kThreads, kResident)
    backward_kernel(const __grid_constant__ BackwardKernel<T> args) {
  using A = Accumulation<T>;
  constexpr bool kResidual = kKept == Kept::input_and_residual;
  constexpr int kOperands = kResidual ? 5 : 3, K = kRows ? V : 1, kTile = kRows ? kMostTile : 1;
  constexpr int U = kResidual ? kBatch / 2 : kBatch;
  const Work work(args.plan, blockIdx.x);
  __shared__ Constants<A, kKept> table[kTile];
  __shared__ A offsets[kTile], slopes[kTile];  // a, b
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g, C = args.saved.C;
    table[g] = Constants<A, kKept>::of(args.saved, c);
    const double n = args.saved.count();
    const bool constant = !args.sums || !(n > 0);
    offsets[g] = constant ? A(0) : A(double(args.sums[c]) / n);
    slopes[g] = constant
                    ? A(0)
                    : A(double(args.sums[C + c]) / n) * (kKept == Kept::output ? A(1) : args.saved.invstd(c));
  }
  __syncthreads();
  Constants<A, kKept> constants[K];
  A offset[K], slope[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int g = kRows ? work.channel<V>(args.plan, k) : 0;
    constants[k] = table[g], offset[k] = offsets[g], slope[k] = slopes[g];
  }
  const A limit = kKept == Kept::output ? args.saved.limit() : A(0);

  const auto body = [&]<class B>(const B& batch) {
    Packet<T, B::V> input[B::U], dy[B::U];
    [[maybe_unused]] Packet<T, B::V> z[kResidual ? B::U : 1];
    batch.load(input, args.input, 0);
    batch.load(dy, args.dy, 1);
    if constexpr (kResidual) batch.load(z, args.z, 3);
    with_activation<kKept != Kept::output>(args.saved.activation, [&]<class Fn>(Fn) {
#pragma unroll
      for (int j = 0; j < B::U; ++j) {
        A in[B::V], g[B::V];
        [[maybe_unused]] A r[B::V];
        input[j].unpack(in);
        dy[j].unpack(g);
        if constexpr (kResidual) z[j].unpack(r);
#pragma unroll
        for (int k = 0; k < B::V; ++k) {
          const int i = kRows ? k : 0;
          const Gradient<A> t = gradient<Fn, kKept>(in[k], g[k], kResidual ? r[k] : A(0), constants[i],
                                                    args.saved.param, limit);
          in[k] = constants[i].scale * (t.dz - offset[i] - t.centred * slope[i]);
          g[k] = t.dz;
        }
        input[j].pack(in);
        if constexpr (kResidual) dy[j].pack(g);
      }
    });
    batch.store(input, args.dx, 2);
    if constexpr (kResidual) batch.store(dy, args.dz, 4);
  };
  if constexpr (kRows)
    walk_rows<V, U, kOperands, false>(args.plan, work, body);
  else
    walk_planes<V, U, kOperands, false>(args.plan, work, args.input, body);
}

void Cuda::backward(const BackwardArgs& args) {
  const Device device(args.device);
  if (args.layout.numel() == 0) return;
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.dx, args.z, args.dz};
    const Plan plan =
        Planner::make(args.layout, pointers, args.z ? 5 : 3, sizeof(T), device.multiprocessors, false);
    const BackwardKernel<T> kernel{plan,
                                   static_cast<const T*>(args.input),
                                   static_cast<const T*>(args.dy),
                                   static_cast<T*>(args.dx),
                                   static_cast<const T*>(args.z),
                                   static_cast<T*>(args.dz),
                                   saved_of<A>(args),
                                   static_cast<const A*>(args.sums)};
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      with_kept(args, [&]<Kept kKept>() {
        STD_CUDA_CHECK(launch(backward_kernel<T, kRows, V, kKept>, plan.blocks(), device.stream, kernel));
      });
    });
  });
}

}  // namespace fastvit
