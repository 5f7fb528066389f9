// act_forward: y = act(x) (* gate). act_backward: dx = dy (* gate) * act'(x), and with a gate
// dgate = dy * act(x).
// Memory   reads x (and gate) once and writes y once; backward reads x, dy (and gate) once and writes dx (and
//          dgate).
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics act' from x, in the accumulation type; one rounding to storage.
// Source   Hendrycks, Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

template <class A>
struct Results {
  Simd<A> first, second;
};

template <class T, class A, bool kBackward, Activation kActivation>
struct Kernel {
  using Fn = ActivationFunction<kActivation>;

  // y, or dx and dgate; dy and gate where they are operands.
  template <class Position>
  static FASTVIT_HOST_DEVICE Results<A> results(Position at, const T* x, const T* dy, const T* gate,
                                                A param) {
    const Simd<A> v = at.load(x);
    if constexpr (!kBackward) {
      const Simd<A> y = Fn::forward(v, param);
      return {gate ? y * at.load(gate) : y, Simd<A>{}};
    } else {
      const Simd<A> g = at.load(dy);
      if (!gate) return {Fn::backward(g, v, param), Simd<A>{}};
      return {Fn::backward(Simd<A>(g * at.load(gate)), v, param), g * Fn::forward(v, param)};
    }
  }

  static void spans(const CpuActParams& args, const SpanGroup<T>& spans) {
    const A param = A(args.activation_param);
    for (int64_t k = 0; k < spans.count; ++k) {
      const T *x = spans.in(0, k), *dy = spans.in(kBackward, k);
      const T* const gate = args.gate ? spans.in(1 + kBackward, k) : nullptr;
      T *const out = spans.out(0, k), *const dgate = kBackward && gate ? spans.out(1, k) : nullptr;
      for_each_vector<A>(
          spans.n, NonTemporalRange(spans.streams, out, spans.n, kLanes<A>),
          [&](auto at) { return results(at, x, dy, gate, param); },
          [&](auto at, const Results<A>& r) {
            at.store(out, r.first);
            if (kBackward && dgate) at.store(dgate, r.second);
          });
    }
  }

  static void run(const CpuActParams& args) {
    const bool gated = args.gate;
    const StridedOperand<T> x(args.x, args.layout, ActForwardStrides::x),
        dy(args.dy, args.layout, ActBackwardStrides::dy),
        gate(args.gate, args.layout, kBackward ? ActBackwardStrides::gate : ActForwardStrides::gate);
    const StridedOperand<T> in[] = {x, kBackward ? dy : gate, gate};
    const StridedOperand<T> y(args.y, args.layout, ActForwardStrides::y),
        dx(args.dx, args.layout, ActBackwardStrides::dx),
        dgate(args.dgate, args.layout, ActBackwardStrides::dgate);
    const StridedOperand<T> out[] = {kBackward ? dx : y, dgate};
    for_each_span(args, in, 1 + kBackward + gated, out, 1 + (kBackward && gated), spans);
  }
};

}  // namespace

void act(const CpuActParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      args.dy ? Kernel<T, A, true, kActivation>::run(args) : Kernel<T, A, false, kActivation>::run(args);
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
