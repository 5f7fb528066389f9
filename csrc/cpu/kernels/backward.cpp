// bn_backward, abn_backward: dx = scale * (dz - a - b * centred), see gradient.h, with a and b from the sums
// over all ranks; dz is written too if a residual was added.
// Memory   reads x (or y), dy (and z) once; writes dx (and dz) once.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Needs    in place: gamma != 0 and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "gradient.h"

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

  static void spans(const BackwardParams& args, const Spans<T>& spans) {
    for (int64_t i = 0; i < spans.count; ++i) {
      const T *x = spans.in(0, i), *dy = spans.in(1, i), *z = args.z ? spans.in(2, i) : nullptr;
      T *const dx = spans.out(0, i), *const dz = args.z ? spans.out(1, i) : nullptr;
      const int64_t c = spans.c + (kRows ? 0 : i);
      const GradientConstants<A, kRows> k(args, c);
      const PerChannel<A, kRows> a(args.a, c), b(args.b, c);
      const auto walk_span = [&](auto has_residual) {
        for_each_vector<A>(
            spans.n, Streaming(spans.streams, dx, spans.n, kLanes<A>),
            [&](auto at) {
              const Gradient<A> g = k.template at<kInPlace, Fn>(at, x, dy, has_residual ? z : nullptr);
              return Gradients<A>{k.scale.at(at) * (g.dz - a.at(at) - g.centred * b.at(at)), g.dz};
            },
            [&](auto at, const Gradients<A>& out) {
              at.store(dx, out.dx);
              if (has_residual && dz) at.store(dz, out.dz);
            });
      };
      if constexpr (kInPlace)
        walk_span(std::false_type());
      else  // as in forward.cpp
        is_transcendental(kActivation) || z ? walk_span(std::true_type()) : walk_span(std::false_type());
    }
  }

  void run() const {
    const Layout& layout = args.layout;
    const Operand<T> in[] = {{args.input, layout, 0}, {args.dy, layout, 1}, {args.z, layout, 3}};
    const Operand<T> out[] = {{args.dx, layout, 2}, {args.dz, layout, 4}};
    for_each_span(args, in, args.z ? 3 : 2, out, args.z ? 2 : 1, spans);
  }
};

}  // namespace

void backward(const BackwardParams& args) {
  dispatch_gradient<Kernel>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
