// bn_backward: dx = scale * (dv - a - b * centred), see bn_gradient.h, with a and b from the sums
// over all ranks; with a residual dv is written too, which is its gradient.
// Memory   reads x (or y), dy (and residual) once; writes dx (and dresidual) once.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Needs    from y: gamma != 0 and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

template <class A>
struct Gradients {
  Simd<A> dx, dv;
};

template <class T, class A, bool kIsRows, bool kFromOutput, Activation kActivation>
struct Kernel {
  using Fn = ActivationFunction<kActivation>;
  const CpuBnBackwardParams& args;

  static void spans(const CpuBnBackwardParams& args, const SpanGroup<T>& spans) {
    for (int64_t i = 0; i < spans.count; ++i) {
      const T *input = spans.in(0, i), *dy = spans.in(1, i);
      const T* const residual = args.residual ? spans.in(2, i) : nullptr;
      T *const dx = spans.out(0, i), *const dresidual = residual ? spans.out(1, i) : nullptr;
      const int64_t c = spans.c + (kIsRows ? 0 : i);
      const BnGradientConstants<A, kIsRows> k(args, c);
      const ChannelConstant<A, kIsRows> a(args.a, c), b(args.b, c);
      const auto walk_span = [&](auto has_residual) {
        for_each_vector<A>(
            spans.n, NonTemporalRange(spans.streams, dx, spans.n, kLanes<A>),
            [&](auto at) {
              const Gradient<A> g =
                  k.template at<kFromOutput, Fn>(at, input, dy, has_residual ? residual : nullptr);
              return Gradients<A>{k.scale.at(at) * (g.dv - a.at(at) - g.centred * b.at(at)), g.dv};
            },
            [&](auto at, const Gradients<A>& out) {
              at.store(dx, out.dx);
              if (has_residual && dresidual) at.store(dresidual, out.dv);
            });
      };
      if constexpr (kFromOutput)
        walk_span(std::false_type());
      else  // as in forward.cpp
        is_transcendental(kActivation) || residual ? walk_span(std::true_type())
                                                   : walk_span(std::false_type());
    }
  }

  void run() const {
    const WalkLayout& layout = args.layout;
    const StridedOperand<T> in[] = {{args.input, layout, BackwardStrides::input},
                                    {args.dy, layout, BackwardStrides::dy},
                                    {args.residual, layout, BackwardStrides::residual}};
    const StridedOperand<T> out[] = {{args.dx, layout, BackwardStrides::dx},
                                     {args.dresidual, layout, BackwardStrides::dresidual}};
    for_each_span(args, in, args.residual ? 3 : 2, out, args.residual ? 2 : 1, spans);
  }
};

}  // namespace

void bn_backward(const CpuBnBackwardParams& args) {
  dispatch_gradient<Kernel>(args);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
