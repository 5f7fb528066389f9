// bn_backward: dx = scale * (dv - a - b * (x - mean)), from y scale * (dv - a - b * xhat),
// scale = gamma * invstd, with a and b from the sums over all ranks; with a residual dv is written too, which
// is its gradient.
// Memory   reads x or y, dy (and residual) once; writes dx (and dresidual) once. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads and stores, a batch
//          in flight.
// Numerics fp32 arithmetic (fp64 for double).
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

template <class T, bool kRows, int V, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kResident)
    backward_kernel(const __grid_constant__ Launched<Planned<BnBackwardArgs>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == Variant::residual;
  constexpr int kOperands = kResidual ? 5 : 3, U = kResidual ? kBatch / 2 : kBatch;
  constexpr int K = kRows ? V : 1, kTile = kRows ? kMaxTile : 1;
  const Work work(args.plan, blockIdx.x);
  __shared__ Constants<A, kVariant> table[kTile];
  __shared__ Correction<A> corrections[kTile];
  const int channels = work.channels(args.plan);
  const A* const sums = static_cast<const A*>(args.global_sums);
  for (int g = threadIdx.x; g < channels; g += kThreads) {
    const int64_t c = work.first_channel(args.plan) + g;
    table[g] = Constants<A, kVariant>::of(args, c);
    corrections[g] = {0, 0};
    if (sums)
      corrections[g] = Correction<A>::template of<kVariant>(args, c, {sums[c], sums[args.layout.C + c]});
  }
  __syncthreads();
  Constants<A, kVariant> constants[K];
  Correction<A> correction[K];
  pick<kRows, V>(constants, table, args.plan, work);
  pick<kRows, V>(correction, corrections, args.plan, work);
  const A limit = largest_xhat<A, kVariant>(args);

  walk<kRows, V, U, kOperands, false>(args.plan, work, args.input, [&]<class B>(const B& batch) {
    Inputs<T, kVariant, B> inputs;
    inputs.template load<kNormal, BackwardOperand::residual>(batch, args);
    propagate<kRows>(batch, inputs, constants, correction, args, limit);
  });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  const Device device(args.device);
  if (args.layout.numel() == 0) return;
  dispatch_type(args.dtype, [&]<class T>() {
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const auto kernel_of = [&]<bool kRows, int V>() {
      return dispatch_variant(args,
                              [&]<Variant kVariant>() { return backward_kernel<T, kRows, V, kVariant>; });
    };
    const Plan plan = Planner{args.layout, pointers, args.residual ? 5 : 3, sizeof(T), device.limits, 0}.plan(
        resident_blocks<T>(device, kernel_of));
    launch_planned<T>(plan, kernel_of, {plan.blocks(), device}, Planned<BnBackwardArgs>{args, plan});
  });
}

}  // namespace fastvit
