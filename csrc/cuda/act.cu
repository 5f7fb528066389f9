// act_forward: y = act(x) (* gate).
// act_backward: dx = dy (* gate) * act'(x), and with a gate dgate = dy * act(x).
//
// Memory:   forward reads x (and gate) once and writes y once. Backward reads x, dy (and gate) once and
//           writes dx (and dgate) once. Bound by bandwidth.
// Mapping:  operands of equal strides without gaps are walked as one long plane; others as rows or planes,
//           see plan.h. Loads and stores of 16 bytes where alignment allows them.
// Numerics: arithmetic in float (double for double).
// Source:   Hendrycks and Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "../activation_ops.h"
#include "activations.cuh"
#include "launch.cuh"
#include "walk.cuh"

namespace fastvit {

struct ActParams : ActArgs {
  LaunchPlan plan;
};

// kCount: the number of operands, the tensors that a kernel accesses. kGate, kResult: the operand indices of
// the gate, and of y or dx.
template <bool kBackward, bool kGated>
struct ActKernelOperands {
  static constexpr int kCount = kBackward ? (kGated ? 5 : 3) : (kGated ? 3 : 2);
  static constexpr int kGate = kBackward ? ActBackwardOperandIndex::gate : ActForwardOperandIndex::gate;
  static constexpr int kResult = kBackward ? ActBackwardOperandIndex::dx : ActForwardOperandIndex::y;
};

// Computes one element. Forward overwrites x with y; backward overwrites x with dx, and a gate with dgate.
// Act: the activation's functions.
template <class Act, bool kBackward, bool kGated, class A>
__device__ __forceinline__ void compute_element(A& x, const A& dy, A& gate, A activation_param) {
  const A v = x;
  if constexpr (!kBackward) {
    x = Act::forward(v, activation_param);
    if constexpr (kGated) x *= gate;
  } else if constexpr (kGated) {
    x = Act::backward(dy * gate, v, activation_param);
    gate = dy * Act::forward(v, activation_param);
  } else {
    x = Act::backward(dy, v, activation_param);
  }
}

// T: storage type of the tensors. V: elements of a vector, which is 16 bytes or one element. kGated: there is
// a gate.
// kIsRows: a block walks rows, in which channels are the fastest dimension, instead of planes of one channel.
// There are no constants per channel, so rows and planes differ only in the order of the accesses.
// A thread loads a batch (type B) at a time: B::U vectors of each operand, each of B::V elements.
template <class T, bool kIsRows, int V, bool kBackward, bool kGated>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    act_kernel(const __grid_constant__ KernelParams<ActParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  using Operands = ActKernelOperands<kBackward, kGated>;
  const A activation_param = A(args.activation_param);
  // Vectors of each operand that a thread has in flight: fewer if there are many operands, to save registers.
  constexpr int kBatchVectors = Operands::kCount > 3 ? kMaxBatchVectors / 2 : kMaxBatchVectors;
  const BlockWork work(args.plan, blockIdx.x);
  for_each_batch<kIsRows, V, kBatchVectors, Operands::kCount, WalkOrder::ascending>(
      args.plan, work, /*operand0=*/args.x, [&]<class B>(const B& batch) {
        Vector<T, B::V> x[B::U], dy[kBackward ? B::U : 1], gate[kGated ? B::U : 1];
        batch.template load<kEvictFirst>(x, args.x, ActForwardOperandIndex::x);
        if constexpr (kBackward) batch.template load<kEvictFirst>(dy, args.dy, ActBackwardOperandIndex::dy);
        if constexpr (kGated) batch.template load<kEvictFirst>(gate, args.gate, Operands::kGate);
#pragma unroll
        for (int j = 0; j < B::U; ++j)
          dispatch_activation_for<T, /*kIncludesNonInvertible=*/true>(args.activation, [&]<class Act>(Act) {
            A x_values[B::V];
            [[maybe_unused]] A dy_values[B::V], gate_values[B::V];
            x[j].unpack(x_values);
            if constexpr (kBackward) dy[j].unpack(dy_values);
            if constexpr (kGated) gate[j].unpack(gate_values);
#pragma unroll
            for (int k = 0; k < B::V; ++k)
              compute_element<Act, kBackward, kGated>(x_values[k], dy_values[k], gate_values[k],
                                                      activation_param);
            x[j].pack(x_values);
            if constexpr (kBackward && kGated) gate[j].pack(gate_values);
          });
        batch.store(x, kBackward ? args.dx : args.y, Operands::kResult);
        if constexpr (kBackward && kGated) batch.store(gate, args.dgate, ActBackwardOperandIndex::dgate);
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
    const void* forward_pointers[] = {args.x, args.y, args.gate};
    const void* backward_pointers[] = {args.x, args.dy, args.dx, args.gate, args.dgate};
    const LaunchPlan plan = LaunchPlanner{.layout = args.layout,
                                          .pointers = kBackward ? backward_pointers : forward_pointers,
                                          .operands = ActKernelOperands<kBackward, kGated>::kCount,
                                          .element_size = sizeof(T),
                                          .limits = context.limits,
                                          .reduced_operands = 0,  // no reduction
                                          // Blocks are cheap to begin: they load no constants.
                                          .min_waves = kMaxWaves}
                                .plan(make_resident_blocks_query<T>(context, kernel_of));
    launch_planned<T>(plan, kernel_of, {plan.blocks(), context}, ActParams{{args}, plan});
  });
}

void backend::act_forward(const ActArgs& args) {
  args.gate ? run_act</*kBackward=*/false, /*kGated=*/true>(args)
            : run_act</*kBackward=*/false, /*kGated=*/false>(args);
}
void backend::act_backward(const ActArgs& args) {
  args.gate ? run_act</*kBackward=*/true, /*kGated=*/true>(args)
            : run_act</*kBackward=*/true, /*kGated=*/false>(args);
}

}  // namespace fastvit
