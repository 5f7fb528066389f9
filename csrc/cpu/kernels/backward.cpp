// bn_backward, abn_backward: dx = scale * (dz - a - b * (x - mean)), in place scale * (dz - a - b * xhat),
// with a and b from the sums over all ranks; dz = dy * act'(v) is written too if a residual was added.
// Memory   reads x (or y), dy (and z) once; writes dx (and dz) once.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics v has the same bits as in the forward pass, so the activation is on the same side of its kink.
// Needs    in place: gamma != 0 and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class A>
struct Gradients {
  Vector<A> dx, dz;
};

template <class T, class A, bool kRows, bool kInPlace, Activation kActivation>
struct Kernel {
  using Fn = ActivationFn<kActivation>;
  const BackwardParams& args;

  struct Constants {
    using Constant = PerChannel<A, kRows>;
    Constant mean, scale, beta, inverse_gamma, a, b;
    A limit, param;
    Constants(const BackwardParams& args, int64_t c)
        : mean(kInPlace ? args.beta : args.saved, c),
          scale(args.scale, c),
          beta(args.beta, c),
          inverse_gamma(kInPlace ? args.inverse_gamma : args.beta, c),
          a(args.a, c),
          b(args.b, c),
          limit(A(args.limit)),
          param(A(args.activation_param)) {}
  };

  template <class Place>
  static FASTVIT_INLINE Gradients<A> gradients(Place at, const T* x, const T* g, const T* r,
                                               const Constants& k) {
    const Vector<A> input = at.load(x), dy = at.load(g), scale = k.scale.at(at);
    if constexpr (kInPlace) {
      const Vector<A> dz = Fn::backward_y(dy, input, k.param);
      const Vector<A> xhat =
          recover_xhat(Fn::inverse(input, k.param), k.beta.at(at), k.inverse_gamma.at(at), k.limit);
      return {scale * (dz - k.a.at(at) - xhat * k.b.at(at)), dz};
    } else {
      const Vector<A> t = input - k.mean.at(at);
      Vector<A> v = t * scale + k.beta.at(at);
      if (r) v += at.load(r);
      const Vector<A> dz = Fn::backward(dy, v, k.param);
      return {scale * (dz - k.a.at(at) - t * k.b.at(at)), dz};
    }
  }

  static void spans(const BackwardParams& args, const Spans<T>& spans) {
    for (int64_t i = 0; i < spans.count; ++i) {
      const T *x = spans.in(0, i), *g = spans.in(1, i), *r = args.z ? spans.in(2, i) : nullptr;
      T *const dx = spans.out(0, i), *const dz = args.z ? spans.out(1, i) : nullptr;
      const Constants k(args, spans.c + (kRows ? 0 : i));
      for_each_vector<A>(
          spans.n, Streaming(spans.streams, dx, spans.n, kLanes<A>),
          [&](auto at) { return gradients(at, x, g, r, k); },
          [&](auto at, const Gradients<A>& out) {
            at.store(dx, out.dx);
            if (dz) at.store(dz, out.dz);
          });
    }
  }

  void run() const {
    const Layout& layout = args.layout;
    const Activations<T> in[] = {{args.input, layout, 0}, {args.dy, layout, 1}, {args.z, layout, 3}};
    const Activations<T> out[] = {{args.dx, layout, 2}, {args.dz, layout, 4}};
    for_each_span(args, in, args.z ? 3 : 2, out, args.z ? 2 : 1, spans);
  }
};

}  // namespace

void backward(const BackwardParams& args) {
  dispatch_dtype(args.dtype, [&]<class T, class A>() { dispatch_gradient<Kernel, T, A>(args); });
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
