// bn_backward without sums: bn_reduce and the op in one launch, for tensors that fit on chip; the same bits
// as the two ops.
// Memory   reads x or y, dy (and residual) once; writes dx (and dresidual) once.
// Mapping  block = (tile of channels, slice of their values), see plan.h; a block holds its values in shared
//          memory. The slices' blocks wait for each other, tile by tile, so all must be resident.
// Numerics as bn_reduce and bn_backward.
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch_memory.h"
#include "smem_cache.cuh"

namespace fastvit {

template <class A>
struct OnChipBackwardParams : Planned<BnBackwardArgs> {
  Partials<Sums<A>> partials;
};

template <class T, bool kRows, int V, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kResident) on_chip_backward_kernel(
    const __grid_constant__ Launched<OnChipBackwardParams<Accumulation<T>>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == Variant::residual;
  constexpr int kOperands = kResidual ? 5 : 3, U = kResidual ? kBatch / 2 : kBatch;
  constexpr int K = kRows ? V : 1, kTile = kRows ? kMaxTile : 1;
  const Plan& plan = args.plan;
  const Work work(plan, blockIdx.x);
  __shared__ Constants<A, kVariant> table[kTile];
  __shared__ Correction<A> corrections[kTile];
  const int64_t first = work.first_channel(plan), C = plan.layout.C;
  for (int g = threadIdx.x; g < work.channels(plan); g += kThreads)
    table[g] = Constants<A, kVariant>::of(args, first + g);
  __syncthreads();
  const A limit = largest_xhat<A, kVariant>(args);

  FASTVIT_DYNAMIC_SHARED(memory);
  SmemCache<T, V, kResidual ? 3 : 2> cache(memory);
  const auto get = [&]<class B>(const B& one, int j) {
    Inputs<T, kVariant, B> inputs;
    cache.get(one, 0, inputs.input, j);
    cache.get(one, 1, inputs.dy, j);
    if constexpr (kResidual) cache.get(one, 2, inputs.residual, j);
    return inputs;
  };
  KahanSums<A> running[K];
  Constants<A, kVariant> constants[K];
  pick<kRows, V>(constants, table, plan, work);
  walk<kRows, V, U, kOperands, true>(plan, work, args.input, [&]<class B>(const B& batch) {
    Inputs<T, kVariant, B> inputs;
    inputs.template load<kStreaming, BackwardOperand::residual>(batch, args);
    cache.put(batch, 0, inputs.input);
    cache.put(batch, 1, inputs.dy);
    if constexpr (kResidual) cache.put(batch, 2, inputs.residual);
    forget_registers();
    add_gradients<T, kRows>(running, batch, constants, args, limit,
                            [&](int j) { return get(batch.vector(j), j); });
    cache.next(batch);
  });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Sums<A>)];
  Sums<A>* shared = reinterpret_cast<Sums<A>*>(bytes);
  const int stride = merge_block(shared, running, plan, work);
  A* const sums = static_cast<A*>(args.local_sums);
  finish<true>(shared, stride, args.partials, plan, work, [&](int64_t c, Sums<A> total) {
    if (kVariant != Variant::from_output) total.second *= saved_invstd<A>(args, c);
    corrections[c - first] = Correction<A>::template of<kVariant>(args, c, total);
    if (work.slice == 0) {
      sums[c] = total.first;
      sums[C + c] = total.second;
    }
  });
  __syncthreads();

  Correction<A> correction[K];
  pick<kRows, V>(constants, table, plan, work);  // read again, to free registers in between
  pick<kRows, V>(correction, corrections, plan, work);
  cache.rewind();
  walk<kRows, V, U, kOperands, true>(plan, work, args.input, [&]<class B>(const B& batch) {
#pragma unroll
    for (int j = 0; j < B::U; ++j) {
      const auto one = batch.vector(j);
      auto inputs = get(one, j);
      propagate<kRows>(one, inputs, constants, correction, args, limit);
    }
    cache.next(batch);
  });
}

bool backend::bn_backward_on_chip(const BnBackwardArgs& args) {
  if (args.layout.numel() == 0) return false;
  const Device device(args.device);
  bool done = false;
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.dx, args.residual, args.dresidual};
    const int cached_operands = args.residual ? 3 : 2;
    const Plan plan =
        Planner{args.layout, pointers, args.residual ? 5 : 3, sizeof(T), device.limits, cached_operands}
            .on_chip();
    if (plan.cached_vectors == 0) return;
    const Slices<Sums<A>> slices(plan, device);
    const OnChipBackwardParams<A> params{{args, plan}, slices.partials()};
    dispatch_vector_walk<T>(plan, [&]<bool kRows, int V>() {
      const auto kernel = dispatch_variant(
          args, [&]<Variant kVariant>() { return on_chip_backward_kernel<T, kRows, V, kVariant>; });
      done = launch_on_chip(kernel, plan, cached_operands, device, params);
    });
  });
  return done;
}

}  // namespace fastvit
