// bn_forward, bn_forward_inplace, bn_apply: y = act((x - mean) * scale + beta (+ residual)), with
// scale = gamma * invstd; if x must be recoverable from y, |gamma| is raised to a floor first. bn_apply takes
// the mean and invstd of an earlier forward.
//
// Memory:   reads x (and the residual) once; writes y once, to a new tensor or over x.
// Mapping:  spans (planes of a channel, or rows) in the order of memory; a thread takes a contiguous range.
// Numerics: the mean is subtracted first, so a mean far larger than the deviations costs no digits.
// Source:   Ioffe and Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include <type_traits>

#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

// Normalizes the spans of a series, which are planes of consecutive channels, or rows. T: storage type. A:
// accumulation type. kIsRows: a span is a row of all channels (channels_last, tokens), else a plane of one
// channel (NCHW).
template <class T, class A, bool kIsRows, Activation kActivation>
void process_series(const CpuBnForwardParams& args, const SpanSeries<T>& series) {
  const A activation_param = A(args.activation_param);
  for (int64_t k = 0; k < series.spans; ++k) {
    const T *x = series.in_span(0, k), *residual = args.residual ? series.in_span(1, k) : nullptr;
    T* const y = series.out_span(0, k);
    const int64_t channel = series.first_channel + (kIsRows ? 0 : k);
    const ChannelConstant<A, kIsRows> mean(args.mean, channel), scale(args.scale, channel),
        beta(args.beta, channel);
    const auto process_span = [&](auto may_have_residual) {
      // NonTemporalRange: the vectors that are stored past the caches, if a call has one large result.
      for_each_vector<A>(
          series.length, NonTemporalRange(series.stores_past_cache, y, series.length, kLanes<A>),
          [&](auto position) FASTVIT_FORCE_INLINE_LAMBDA {
            Simd<A> v = multiply_add<A>(position.load(x) - mean.load(position), scale.load(position),
                                        beta.load(position));
            if (may_have_residual && residual) v += position.load(residual);
            return ActivationFunction<kActivation>::forward(v, activation_param);
          },
          [&](auto position, Simd<A> result) { position.store(y, result); });
    };
    // Without a residual, a cheap activation takes an eighth less time in 16-bit types if its loop has no
    // branch for a residual. A transcendental activation takes so long that this does not matter, so one
    // loop serves both cases.
    is_transcendental(kActivation) || residual ? process_span(std::true_type())
                                               : process_span(std::false_type());
  }
}

template <class T, class A, bool kIsRows, Activation kActivation>
inline void run_kernel(const CpuBnForwardParams& args) {
  const StridedOperand<T> in[] = {{args.x, args, ForwardOperandIndex::x},
                                  {args.residual, args, ForwardOperandIndex::residual}};
  const StridedOperand<T> out[] = {{args.y, args, ForwardOperandIndex::y}};
  for_each_span(args, in, /*in_count=*/args.residual ? 2 : 1, out, /*out_count=*/1,
                process_series<T, A, kIsRows, kActivation>);
}

}  // namespace

void bn_forward(const CpuBnForwardParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() {
    using A = Accumulation<T>;
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      args.layout.is_rows ? run_kernel<T, A, /*kIsRows=*/true, kActivation>(args)
                          : run_kernel<T, A, /*kIsRows=*/false, kActivation>(args);
    });
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
