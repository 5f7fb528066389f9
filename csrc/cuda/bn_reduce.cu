// bn_reduce: sum dv and sum dv*xhat per channel; dv is the gradient before the activation. With
// an exchange a second row has the sums over all ranks.
// Memory   reads x or y, dy (and residual) once; writes 2C numbers. Bandwidth-bound.
// Mapping  block = (tile of channels, slice of their values), see plan.h; 16-byte loads, a batch in flight;
//          slices are merged by the last block of a tile to finish.
// Numerics fp32 accumulation (fp64 for double), compensated, in a fixed order, no float atomics. From x the
//          second sum is of dv*(x - mean), multiplied by invstd at the end.
// Needs    from y: gamma != 0 (ensured by its floor) and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "bn_gradient.cuh"
#include "launch.cuh"
#include "exchange.cuh"
#include "launch_memory.h"

namespace fastvit {

template <class A, bool kHasExchange>
struct ReduceParams : Planned<BnBackwardArgs>, ExchangeParams<kHasExchange> {
  Partials<Sums<A>> partials;
  unsigned* exchange_words;
};

template <class T, bool kHasExchange, bool kRows, int V, Variant kVariant>
__global__ void __launch_bounds__(kThreads, kResident)
    reduce_kernel(const __grid_constant__ Launched<ReduceParams<Accumulation<T>, kHasExchange>> launched) {
  const auto& args = launched.begin();
  using A = Accumulation<T>;
  constexpr bool kResidual = kVariant == Variant::residual;
  constexpr int kOperands = kResidual ? 3 : 2, U = kResidual ? kBatch / 2 : kBatch, K = kRows ? V : 1;
  const Work work(args.plan, gridDim.x - 1 - blockIdx.x);
  __shared__ Constants<A, kVariant> table[kRows ? kMaxTile : 1];
  const int channels = work.channels(args.plan);
  for (int g = threadIdx.x; g < channels; g += kThreads)
    table[g] = Constants<A, kVariant>::of(args, work.first_channel(args.plan) + g);
  __syncthreads();
  Constants<A, kVariant> constants[K];
  pick<kRows, V>(constants, table, args.plan, work);
  const A limit = largest_xhat<A, kVariant>(args);

  KahanSums<A> running[K];
  walk<kRows, V, U, kOperands, true>(args.plan, work, args.input, [&]<class B>(const B& batch) {
    Inputs<T, kVariant, B> inputs;
    inputs.template load<kNormal, ReduceOperand::residual>(batch, args);
    add_gradients<T, kRows>(running, batch, constants, args, limit, [&](int j) { return inputs.vector(j); });
  });

  __shared__ __align__(16) unsigned char bytes[kThreads * K * sizeof(Sums<A>)];
  Sums<A>* shared = reinterpret_cast<Sums<A>*>(bytes);
  const int stride = merge_block(shared, running, args.plan, work);
  const int64_t C = args.layout.C;
  A* const sums = static_cast<A*>(args.local_sums);
  const auto write = [&](int64_t c, Sums<A> total) {
    if (kVariant != Variant::from_output) total.second *= saved_invstd<A>(args, c);
    sums[c] = total.first;
    sums[C + c] = total.second;
    return total;
  };
  if constexpr (kHasExchange) {
    const Push<A> push(args.peers);
    push.header();
    if (finish(shared, stride, args.partials, args.plan, work, [&](int64_t c, const Sums<A>& total) {
          const Sums<A> own = write(c, total);
          push.pair(c, own.first, own.second);
        }))
      wait_in_last_blocks(args.plan, args.max_parts, args.exchange_words,
                          [&](const Part& part) { end_sums(args.peers, part, sums + 2 * C, C); });
  } else {
    finish(shared, stride, args.partials, args.plan, work, write);
  }
}

void backend::bn_reduce(const BnBackwardArgs& args) {
  const Device device(args.device);
  if (args.layout.C == 0) return;
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    const void* pointers[] = {args.input, args.dy, args.residual};
    const int operands = args.residual ? 3 : 2;
    dispatch_exchange<A>(
        args, device.limits, [&]<bool kHasExchange>(const ExchangeParams<kHasExchange>& shares) {
          const auto kernel_of = [&]<bool kRows, int V>() {
            return dispatch_variant(
                args, [&]<Variant kVariant>() { return reduce_kernel<T, kHasExchange, kRows, V, kVariant>; });
          };
          const Plan plan = Planner{args.layout, pointers, operands, sizeof(T), device.limits, operands}.plan(
              resident_blocks<T>(device, kernel_of));
          const Slices<Sums<A>> slices(plan, device, kHasExchange);
          const ReduceParams<A, kHasExchange> params{
              {args, plan}, shares, slices.partials(), slices.exchange_words};
          launch_planned<T>(plan, kernel_of, {plan.blocks(), device}, params);
        });
  });
}

}  // namespace fastvit
