// bn_backward, abn_backward: dx = scale * (dz - a - b * (x - mean)), in place scale * (dz - a - b * xhat),
// scale = gamma * invstd, with a and b from the sums over all ranks; dz is written too if a residual was
// added.
// Memory   reads x or y, dy (and z) once; writes dx (and dz) once. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads and stores, a batch
//          in flight.
// Numerics fp32 arithmetic (fp64 for double).
// Needs    in place: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "backend.h"
#include "gradient.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

template <class T>
struct BackwardParams {
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
template <class T, Activations kSet, bool kRows, int V, Source kSource>
__global__ void __launch_bounds__(kThreads, kResident)
    backward_kernel(const __grid_constant__ Launched<BackwardParams<T>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  constexpr bool kResidual = kSource == Source::input_and_residual;
  constexpr int kOperands = kResidual ? 5 : 3, U = kResidual ? kBatch / 2 : kBatch;
  constexpr int K = kRows ? V : 1, kTile = kRows ? kMostTile : 1;
  const Work work(args.plan, blockIdx.x);
  prefetch_first<kRows, V, U, kOperands, false, kResidual ? 3 : 0>(args.plan, work, args.input, args.dy,
                                                                   args.z);
  __shared__ Constants<A, kSource> table[kTile];
  __shared__ Correction<A> corrections[kTile];
  const int channels = work.channels(args.plan);
  const int64_t C = args.saved.C;
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = Constants<A, kSource>::of(args.saved, c);
    corrections[g] = {0, 0};
    if (args.sums)
      corrections[g] = Correction<A>::template of<kSource>(args.saved, c, {args.sums[c], args.sums[C + c]});
  }
  __syncthreads();
  Constants<A, kSource> constants[K];
  Correction<A> correction[K];
  pick<kRows, V>(constants, table, args.plan, work);
  pick<kRows, V>(correction, corrections, args.plan, work);
  const A limit = kSource == Source::output ? args.saved.limit() : A(0);

  walk<kRows, V, U, kOperands, false>(args.plan, work, args.input, [&]<class B>(const B& batch) {
    Read<T, kSource, B> read;
    batch.load_last(read.input, args.input, 0);
    batch.load_last(read.dy, args.dy, 1);
    if constexpr (kResidual) batch.load_last(read.z, args.z, 3);
    propagate<kSet, kRows>(batch, read, constants, correction, args.saved, limit);
    batch.store(read.input, args.dx, 2);
    if constexpr (kResidual) batch.store(read.dy, args.dz, 4);
  });
}

// Selects the compiled kernel for these arguments.
template <class T, bool kRows, int V>
auto backward_kernel_of(const BackwardArgs& args) {
  void (*kernel)(Launched<BackwardParams<T>>) = nullptr;
  with_activations<T, V>(args.activation, [&]<Activations kSet>() {
    with_source(args, [&]<Source kSource>() { kernel = backward_kernel<T, kSet, kRows, V, kSource>; });
  });
  return kernel;
}

void Cuda::backward(const BackwardArgs& args) {
  const Device device(args.device);
  if (args.layout.numel() == 0) return;
  with_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.dx, args.z, args.dz};
    const auto kernel_of = [&]<bool kRows, int V>() { return backward_kernel_of<T, kRows, V>(args); };
    const Plan plan = Planner::make(args.layout, pointers, args.z ? 5 : 3, sizeof(T), device.limits, 0,
                                    resident_blocks<T>(device, kernel_of));
    const BackwardParams<T> params{plan,
                                   static_cast<const T*>(args.input),
                                   static_cast<const T*>(args.dy),
                                   static_cast<T*>(args.dx),
                                   static_cast<const T*>(args.z),
                                   static_cast<T*>(args.dz),
                                   saved_of<A>(args),
                                   static_cast<const A*>(args.sums)};
    with_walk<T>(plan, [&]<bool kRows, int V>() {
      STD_CUDA_CHECK(launch(kernel_of.template operator()<kRows, V>(), {plan.blocks(), device}, params));
    });
  });
}

}  // namespace fastvit
