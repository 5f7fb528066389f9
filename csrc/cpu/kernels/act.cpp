// act_forward: y = act(x) (* gate). act_backward: dx = dy (* gate) * act'(x), and with a gate
// dgate = dy * act(x).
// Memory   reads x (and gate) once and writes y once; backward reads x, dy (and gate) once and writes dx (and
//          dgate).
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics act' from x, in the accumulation type; one rounding to storage.
// Source   Hendrycks, Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "spans.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class A>
struct Results {
  Vector<A> first, second;
};

template <class T, class A, bool kBackward, Activation kActivation>
struct Kernel {
  using Fn = ActivationFn<kActivation>;

  // y, or dx and dgate; dy and gate where they are operands.
  template <class At>
  static FASTVIT_INLINE Results<A> results(At at, const T* x, const T* dy, const T* gate, A param) {
    const Vector<A> v = at.load(x);
    if constexpr (!kBackward) {
      const Vector<A> y = Fn::forward(v, param);
      return {gate ? y * at.load(gate) : y, Vector<A>{}};
    } else {
      const Vector<A> g = at.load(dy);
      if (!gate) return {Fn::backward(g, v, param), Vector<A>{}};
      return {Fn::backward(Vector<A>(g * at.load(gate)), v, param), g * Fn::forward(v, param)};
    }
  }

  static void spans(const ActParams& args, const Spans<T>& spans) {
    const A param = A(args.activation_param);
    for (int64_t k = 0; k < spans.count; ++k) {
      const T *x = spans.in(0, k), *dy = spans.in(kBackward, k);
      const T* const gate = args.gate ? spans.in(1 + kBackward, k) : nullptr;
      T *const out = spans.out(0, k), *const dgate = kBackward && gate ? spans.out(1, k) : nullptr;
      for_each_vector<A>(
          spans.n, Streaming(spans.streams, out, spans.n, kLanes<A>),
          [&](auto at) { return results(at, x, dy, gate, param); },
          [&](auto at, const Results<A>& r) {
            at.store(out, r.first);
            if (kBackward && dgate) at.store(dgate, r.second);
          });
    }
  }

  static void run(const ActParams& args) {
    const bool gated = args.gate;
    const Operand<T> x(args.x, args.layout, ActForwardOperand::x),
        dy(args.dy, args.layout, ActBackwardOperand::dy),
        gate(args.gate, args.layout, kBackward ? ActBackwardOperand::gate : ActForwardOperand::gate);
    const Operand<T> in[] = {x, kBackward ? dy : gate, gate};
    const Operand<T> y(args.y, args.layout, ActForwardOperand::y),
        dx(args.dx, args.layout, ActBackwardOperand::dx),
        dgate(args.dgate, args.layout, ActBackwardOperand::dgate);
    const Operand<T> out[] = {kBackward ? dx : y, dgate};
    for_each_span(args, in, 1 + kBackward + gated, out, 1 + (kBackward && gated), spans);
  }
};

}  // namespace

void act(const ActParams& args) {
  dispatch_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      args.dy ? Kernel<T, A, true, kActivation>::run(args) : Kernel<T, A, false, kActivation>::run(args);
    });
  });
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
