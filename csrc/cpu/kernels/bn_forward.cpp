// bn_forward, bn_forward_inplace, bn_apply: y = act((x - mean) * scale + beta (+ residual)),
// scale = gamma * invstd.
// Memory   reads x (and residual) once, writes y once, over x or to a new tensor.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics the mean is subtracted first, so a mean much larger than the deviation loses no digits.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include <type_traits>

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

template <class T, class A, bool kIsRows, Activation kActivation>
void forward_spans(const CpuBnForwardParams& args, const SpanGroup<T>& spans) {
  const A param = A(args.activation_param);
  for (int64_t k = 0; k < spans.count; ++k) {
    const T *x = spans.in(0, k), *residual = args.residual ? spans.in(1, k) : nullptr;
    T* const y = spans.out(0, k);
    const int64_t c = spans.c + (kIsRows ? 0 : k);
    const ChannelConstant<A, kIsRows> mean(args.mean, c), scale(args.scale, c), beta(args.beta, c);
    const auto walk_span = [&](auto has_residual) {
      for_each_vector<A>(
          spans.n, NonTemporalRange(spans.streams, y, spans.n, kLanes<A>),
          [&](auto at) {
            Simd<A> v = (at.load(x) - mean.at(at)) * scale.at(at) + beta.at(at);
            if (has_residual && residual) v += at.load(residual);
            return ActivationFunction<kActivation>::forward(v, param);
          },
          [&](auto at, Simd<A> result) { at.store(y, result); });
    };
    // Without a branch for a residual in its loop a cheap activation takes an eighth less time in half
    // precision.
    is_transcendental(kActivation) || residual ? walk_span(std::true_type()) : walk_span(std::false_type());
  }
}

template <class T, class A, bool kIsRows, Activation kActivation>
inline void walk(const CpuBnForwardParams& args) {
  const StridedOperand<T> in[] = {{args.x, args.layout, ForwardStrides::x},
                                  {args.residual, args.layout, ForwardStrides::residual}};
  const StridedOperand<T> out[] = {{args.y, args.layout, ForwardStrides::y}};
  for_each_span(args, in, args.residual ? 2 : 1, out, 1, forward_spans<T, A, kIsRows, kActivation>);
}

}  // namespace

void bn_forward(const CpuBnForwardParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      args.layout.is_rows ? walk<T, A, true, kActivation>(args) : walk<T, A, false, kActivation>(args);
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
