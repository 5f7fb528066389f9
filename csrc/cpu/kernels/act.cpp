// act_forward: y = act(x) (* gate).
// act_backward: dx = dy (* gate) * act'(x), and with a gate dgate = dy * act(x).
//
// Memory:   forward reads x (and gate) once and writes y once.
//           Backward reads x, dy (and gate) once and writes dx (and dgate) once.
// Mapping:  spans (planes of a channel, or rows) in the order of memory; a thread takes a contiguous range.
// Numerics: act' is computed from x, in the accumulation type; a result is rounded once, to the storage type.
// Source:   Hendrycks and Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

template <class A>
struct ActResults {
  Simd<A> result;  // y, or dx in backward
  Simd<A> dgate;   // only in backward with a gate
};

// T: storage type. A: accumulation type.
template <class T, class A, bool kIsBackward, Activation kActivation>
struct ActKernel {
  using ActFunction = ActivationFunction<kActivation>;

  // The tensors' indices for SpanSeries::in_span, and for out_span.
  static constexpr int kX = 0, kDy = 1, kGate = kIsBackward ? 2 : 1;
  static constexpr int kResult = 0, kDgate = 1;

  // Computes the results of the vector at `position` of the spans. A forward does not read dy. gate may be
  // null.
  template <class Position>
  static FASTVIT_FORCE_INLINE ActResults<A> compute(Position position, const T* x, const T* dy, const T* gate,
                                                    A activation_param) {
    const Simd<A> v = position.load(x);
    if constexpr (!kIsBackward) {
      const Simd<A> y = ActFunction::forward(v, activation_param);
      return {gate ? y * position.load(gate) : y, Simd<A>{}};
    } else {
      const Simd<A> dy_values = position.load(dy);
      if (!gate) return {ActFunction::backward(dy_values, v, activation_param), Simd<A>{}};
      return {ActFunction::backward(Simd<A>(dy_values * position.load(gate)), v, activation_param),
              dy_values * ActFunction::forward(v, activation_param)};
    }
  }

  // A series is one or more spans of equal length: planes of consecutive channels, or rows.
  static void process_series(const CpuActParams& args, const SpanSeries<T>& series) {
    const A activation_param = A(args.activation_param);
    for (int64_t k = 0; k < series.spans; ++k) {
      const T *x = series.in_span(kX, k), *dy = kIsBackward ? series.in_span(kDy, k) : nullptr;
      const T* const gate = args.gate ? series.in_span(kGate, k) : nullptr;
      T* const result = series.out_span(kResult, k);
      T* const dgate = kIsBackward && gate ? series.out_span(kDgate, k) : nullptr;
      // NonTemporalRange: the vectors that are stored past the caches, if a call has one large result.
      for_each_vector<A>(
          series.length, NonTemporalRange(series.stores_past_cache, result, series.length, kLanes<A>),
          [&](auto position)
              FASTVIT_FORCE_INLINE_LAMBDA { return compute(position, x, dy, gate, activation_param); },
          [&](auto position, const ActResults<A>& results) {
            position.store(result, results.result);
            if (kIsBackward && dgate) position.store(dgate, results.dgate);
          });
    }
  }

  static void run(const CpuActParams& args) {
    const bool has_gate = args.gate;
    // A tensor that the call does not have is made too, without data. It is not walked.
    const StridedOperand<T> x(args.x, args, ActForwardOperandIndex::x),
        dy(args.dy, args, ActBackwardOperandIndex::dy),
        gate(args.gate, args, kIsBackward ? ActBackwardOperandIndex::gate : ActForwardOperandIndex::gate);
    const StridedOperand<T> y(args.y, args, ActForwardOperandIndex::y),
        dx(args.dx, args, ActBackwardOperandIndex::dx),
        dgate(args.dgate, args, ActBackwardOperandIndex::dgate);
    const StridedOperand<T> forward_in[] = {x, gate}, backward_in[] = {x, dy, gate};
    const StridedOperand<T> out[] = {kIsBackward ? dx : y, dgate};
    for_each_span(args, kIsBackward ? backward_in : forward_in, /*in_count=*/1 + kIsBackward + has_gate, out,
                  /*out_count=*/1 + (kIsBackward && has_gate), process_series);
  }
};

}  // namespace

void act(const CpuActParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      args.dy ? ActKernel<T, A, /*kIsBackward=*/true, kActivation>::run(args)
              : ActKernel<T, A, /*kIsBackward=*/false, kActivation>::run(args);
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
