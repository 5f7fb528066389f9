// act_forward: y = act(x) (* gate). act_backward: dx = dy (* gate) * act'(x), and with a gate
// dgate = dy * act(x).
// Memory   reads x (and gate) once, writes y once; backward reads x, dy (and gate) once, writes dx (and
//          dgate) once. Bandwidth-bound.
// Mapping  operands that lie alike are one plane, others rows or planes, see plan.h; 16-byte loads and
//          stores, a batch in flight.
// Numerics fp32 arithmetic (fp64 for double).
// Source   Hendrycks, Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "../activation_ops.h"
#include "activations.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

struct ActParams : ActArgs {
  LaunchPlan plan;
};

template <class T, bool kIsRows, int V, bool kBackward, bool kGated>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    act_kernel(const __grid_constant__ KernelParams<ActParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  constexpr int kOperands = (kBackward ? 3 : 2) + (kGated ? (kBackward ? 2 : 1) : 0);
  constexpr int kGate = kBackward ? ActBackwardStrides::gate : ActForwardStrides::gate;
  constexpr int kResult = kBackward ? ActBackwardStrides::dx : ActForwardStrides::y;
  const A param = A(args.activation_param);
  constexpr int U = kOperands > 3 ? kBatch / 2 : kBatch;
  const BlockWork work(args.plan, blockIdx.x);
  for_each_batch<kIsRows, V, U, kOperands, WalkOrder::ascending>(
      args.plan, work, args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], dy[kBackward ? B::U : 1], gate[kGated ? B::U : 1];
        batch.template load<kEvictFirst>(x, args.x, ActForwardStrides::x);
        if constexpr (kBackward) batch.template load<kEvictFirst>(dy, args.dy, ActBackwardStrides::dy);
        if constexpr (kGated) batch.template load<kEvictFirst>(gate, args.gate, kGate);
#pragma unroll
        for (int j = 0; j < B::U; ++j)
          dispatch_activation_for<T, true>(args.activation, [&]<class Fn>(Fn) {
            A v[B::V];
            [[maybe_unused]] A g[B::V], factor[B::V];
            x[j].unpack(v);
            if constexpr (kBackward) dy[j].unpack(g);
            if constexpr (kGated) gate[j].unpack(factor);
#pragma unroll
            for (int k = 0; k < B::V; ++k) {
              const A at = v[k];
              if constexpr (!kBackward) {
                v[k] = Fn::forward(at, param);
                if constexpr (kGated) v[k] *= factor[k];
              } else if constexpr (kGated) {
                v[k] = Fn::backward(g[k] * factor[k], at, param);
                factor[k] = g[k] * Fn::forward(at, param);
              } else {
                v[k] = Fn::backward(g[k], at, param);
              }
            }
            x[j].pack(v);
            if constexpr (kBackward && kGated) gate[j].pack(factor);
          });
        batch.store(x, kBackward ? args.dx : args.y, kResult);
        if constexpr (kBackward && kGated) batch.store(gate, args.dgate, ActBackwardStrides::dgate);
      });
}

template <bool kBackward, bool kGated>
void run_act(const ActArgs& args) {
  const LaunchContext context(args.device);
  if (args.layout.numel() == 0) return;
  dispatch_storage_type(args.dtype, [&]<class T>() {
    const auto kernel_of = [&]<bool kIsRows, int V>() {
      return act_kernel<T, kIsRows, V, kBackward, kGated>;
    };
    const void* forward[] = {args.x, args.y, args.gate};
    const void* backward[] = {args.x, args.dy, args.dx, args.gate, args.dgate};
    const int operands = kBackward ? (kGated ? 5 : 3) : (kGated ? 3 : 2);
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = kBackward ? backward : forward,
                                          .operands = operands,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .merged_operands = 0,
                                          .min_waves = kMaxWaves}
                                .plan(resident_blocks<T>(context, kernel_of));
    launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, ActParams{{args}, plan});
  });
}

void backend::act_forward(const ActArgs& args) {
  args.gate ? run_act<false, true>(args) : run_act<false, false>(args);
}
void backend::act_backward(const ActArgs& args) {
  args.gate ? run_act<true, true>(args) : run_act<true, false>(args);
}

}  // namespace fastvit
