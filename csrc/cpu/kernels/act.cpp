// act_forward, glu_forward: y = act(x) (* b). act_backward, glu_backward: dx = dy (* b) * act'(x), and with a
// gate db = dy * act(x).
// Memory   reads x (and b) once and writes y once; backward reads x, dy (and b) once and writes dx (and db).
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics act' from x, in the accumulation type; one rounding to storage.
// Source   Hendrycks, Gimpel, arXiv:1606.08415; gates: Shazeer, arXiv:2002.05202.
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class A>
struct Results {
  Vector<A> first, second;
};

// What one vector of each operand gives: y, or dx and db.
template <class A, bool kBackward, bool kGated, Activation kActivation>
FASTVIT_INLINE Results<A> results(Vector<A> x, Vector<A> dy, Vector<A> b, A param) {
  using Fn = ActivationFn<kActivation>;
  if constexpr (!kBackward) {
    const Vector<A> y = Fn::forward(x, param);
    return {kGated ? y * b : y, Vector<A>{}};
  } else if constexpr (kGated) {
    return {Fn::backward(Vector<A>(dy * b), x, param), dy * Fn::forward(x, param)};
  } else {
    return {Fn::backward(dy, x, param), Vector<A>{}};
  }
}

template <class T, class A, bool kBackward, bool kGated, Activation kActivation>
struct Kernel {
  static constexpr bool kSecond = kBackward && kGated;

  static void spans(const ActParams& args, const Spans<T>& spans) {
    const A param = A(args.activation_param);
    for (int64_t k = 0; k < spans.count; ++k) {
      const T *x = spans.in(0, k), *g = spans.in(kBackward, k), *b = spans.in(kBackward + kGated, k);
      T *const out = spans.out(0, k), *const db = spans.out(kSecond, k);
      for_each_vector<A>(
          spans.n, Streaming(spans.streams, out, spans.n, kLanes<A>),
          [&](auto at) {
            return results<A, kBackward, kGated, kActivation>(
                at.load(x), kBackward ? at.load(g) : Vector<A>{}, kGated ? at.load(b) : Vector<A>{}, param);
          },
          [&](auto at, const Results<A>& r) {
            at.store(out, r.first);
            if (kSecond) at.store(db, r.second);
          });
    }
  }

  static void run(const ActParams& args) {
    const Activations<T> x(args.x, args.layout, 0), dy(args.dy, args.layout, 1),
        b(args.b, args.layout, 2 + kBackward);
    const Activations<T> in[] = {x, kBackward ? dy : b, b};
    const Activations<T> out[] = {{args.out, args.layout, 1 + kBackward}, {args.db, args.layout, 4}};
    for_each_span<1 + kBackward + kGated, 1 + kSecond>(args, in, out, spans);
  }
};

}  // namespace

void act(const ActParams& args) {
  dispatch_dtype(args.dtype, [&]<class T, class A>() {
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      if (args.dy)
        args.b ? Kernel<T, A, true, true, kActivation>::run(args)
               : Kernel<T, A, true, false, kActivation>::run(args);
      else
        args.b ? Kernel<T, A, false, true, kActivation>::run(args)
               : Kernel<T, A, false, false, kActivation>::run(args);
    });
  });
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
