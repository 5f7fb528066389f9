// bn_backward: dx = scale * (dv - mean(dv) - xhat * mean(dv * xhat)) and dresidual = dv, with
// scale = gamma * invstd and dv the gradient of act's input. The means are over all ranks.
//
// Memory:   reads x (or y), dy (and the residual) once; writes dx (and dresidual) once.
// Mapping:  spans (planes of a channel, or rows) in the order of memory; a thread takes a contiguous range.
// Numerics: arithmetic in the accumulation type; one rounding to storage.
// Needs:    with from_output, an invertible activation, and the floored gamma, which is not 0.
// Source:   Ioffe and Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "bn_gradient.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

template <class A>
struct Results {
  Simd<A> dx, dv;
};

// T: storage type. A: accumulation type. kIsRows: a span is a row of all channels (channels_last, tokens),
// else a plane of one channel (NCHW). kFromOutput: `input` is y, else x.
template <class T, class A, bool kIsRows, bool kFromOutput, Activation kActivation>
struct BnBackwardKernel {
  using ActFunction = ActivationFunction<kActivation>;
  const CpuBnBackwardParams& args;

  // The operands of in_span and out_span are numbered as in run().
  static void process_series(const CpuBnBackwardParams& args, const SpanSeries<T>& series) {
    for (int64_t k = 0; k < series.spans; ++k) {
      const T *input = series.in_span(0, k), *dy = series.in_span(1, k);
      const T* const residual = args.residual ? series.in_span(2, k) : nullptr;
      T *const dx = series.out_span(0, k), *const dresidual = residual ? series.out_span(1, k) : nullptr;
      const int64_t channel = series.first_channel + (kIsRows ? 0 : k);
      const BnGradientConstants<A, kIsRows> constants(args, channel);
      // From y, second_factor is xhat and slope is mean(dv * xhat). From x, second_factor is x - mean and
      // slope is mean(dv * xhat) * invstd.
      const ChannelConstant<A, kIsRows> mean_dv(args.mean_dv, channel), slope(args.slope, channel);
      const auto process_span = [&](auto may_have_residual) {
        // NonTemporalRange: the vectors that are stored past the caches, if a call has one large result.
        for_each_vector<A>(
            series.length, NonTemporalRange(series.stores_past_cache, dx, series.length, kLanes<A>),
            [&](auto position) FASTVIT_FORCE_INLINE_LAMBDA {
              const auto [dv, second_factor] = constants.template evaluate<kFromOutput, ActFunction>(
                  position, input, dy, may_have_residual ? residual : nullptr);
              return Results<A>{constants.scale.load(position) *
                                    (dv - mean_dv.load(position) - second_factor * slope.load(position)),
                                dv};
            },
            [&](auto position, const Results<A>& results) {
              position.store(dx, results.dx);
              if (may_have_residual && dresidual) position.store(dresidual, results.dv);
            });
      };
      if constexpr (kFromOutput)  // such a call has no residual
        process_span(std::false_type());
      else  // a cheap activation is faster if its loop has no branch for a residual
        is_transcendental(kActivation) || residual ? process_span(std::true_type())
                                                   : process_span(std::false_type());
    }
  }

  void run() const {
    const StridedOperand<T> in[] = {{args.input, args, BackwardOperandIndex::input},
                                    {args.dy, args, BackwardOperandIndex::dy},
                                    {args.residual, args, BackwardOperandIndex::residual}};
    const StridedOperand<T> out[] = {{args.dx, args, BackwardOperandIndex::dx},
                                     {args.dresidual, args, BackwardOperandIndex::dresidual}};
    for_each_span(args, in, /*in_count=*/args.residual ? 3 : 2, out, /*out_count=*/args.residual ? 2 : 1,
                  process_series);
  }
};

}  // namespace

void bn_backward(const CpuBnBackwardParams& args) {
  dispatch_gradient<BnBackwardKernel>(args);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
