// bn_reduce: the sums of dv and of dv * second_factor per channel, where dv is the gradient of act's input.
// second_factor is x - mean, or with from_output the xhat that is recovered from y (bn_gradient.h).
//
// Memory:   reads x (or y), dy (and the residual) once; writes two doubles per slice and channel, and dv to
//           args.dv if that is not null. dv lies in memory as x does.
// Mapping:  a task takes some channels in a slice (some rows or segments of planes), in the order of memory.
// Numerics: at most 2048 elements of a channel's planes, or about 128 rows, are summed in the accumulation
//           type; their sums are added in double, in a fixed order.
// Needs:    with from_output, an invertible activation, and the floored gamma, which is not 0.
// Source:   arXiv:1712.02616, section 3.
#include <type_traits>

#include "bn_gradient.h"
#include "sums.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

// Adds the terms of a series of planes to sums[first_sum], sums[first_sum + 1], ..., one for each channel.
// With is_first these sums are not yet set, and it sets them.
template <class A, class T>
using SumPlaneSeries = void (*)(const CpuBnBackwardParams& args, const SpanSeries<T>& series, int first_sum,
                                bool is_first, TermPair<A>* sums);

// T: storage type. A: accumulation type. sum_series is called by pointer, so that this function is compiled
// once for all activations.
template <class A, class T>
void reduce_planes(const CpuBnBackwardParams& args, const Task& task, double* sum_dv,
                   double* sum_dv_times_factor, SumPlaneSeries<A, T> sum_series) {
  const StridedOperand<T> in[] = {{args.input, args, ReduceOperandIndex::input},
                                  {args.dy, args, ReduceOperandIndex::dy},
                                  {args.residual, args, ReduceOperandIndex::residual}};
  sum_planes<A>(
      args, in, /*operand_count=*/args.residual ? 3 : 2, task, sum_series,
      [&](int /*k*/, int64_t channel, const TermPair<A>& sums, int64_t /*unit*/, int64_t /*count*/) {
        sum_dv[channel] += double(sum_lanes<A>(sums.first));
        sum_dv_times_factor[channel] += double(sum_lanes<A>(sums.second));
      });
}

// kIsRows: a span is a row of all channels (channels_last, tokens), else a plane of one channel (NCHW).
// kFromOutput: `input` is y, else x.
template <class T, class A, bool kIsRows, bool kFromOutput, Activation kActivation>
struct BnReduceKernel {
  using ActFunction = ActivationFunction<kActivation>;
  const CpuBnBackwardParams& args;
  const StridedOperand<T> input{args.input, args, ReduceOperandIndex::input},
      dy{args.dy, args, ReduceOperandIndex::dy}, residual{args.residual, args, ReduceOperandIndex::residual};
  using Constants = BnGradientConstants<A, kIsRows>;

  struct Spans {
    const T *input, *dy, *residual;  // residual: may be null
    T* dv;                           // where dv is stored; may be null
  };
  static constexpr bool kMayStoreDv = is_transcendental(kActivation) && std::is_same_v<T, A>;
  // dv lies in memory as the input does. input_span: its address in the input, not that of a gathered copy.
  static T* find_dv(const CpuBnBackwardParams& args, const T* input_span) {
    return args.dv ? static_cast<T*>(args.dv) + (input_span - static_cast<const T*>(args.input)) : nullptr;
  }
  // position: of a vector in the spans.
  template <class Position>
  static FASTVIT_FORCE_INLINE TermPair<A> compute_terms(Position position, const Spans& spans,
                                                        const Constants& constants) {
    const auto [dv, second_factor] = constants.template evaluate<kFromOutput, ActFunction>(
        position, spans.input, spans.dy, spans.residual);
    if (kMayStoreDv && spans.dv) position.store(spans.dv, dv);
    return {dv, dv * second_factor};
  }

  static void sum_plane_series(const CpuBnBackwardParams& args, const SpanSeries<T>& series, int first_sum,
                               bool is_first, TermPair<A>* sums) {
    for (int k = 0; k < series.spans; ++k) {
      const Constants constants(args, series.first_channel + k);
      const T* const input = series.in_span(0, k);
      const Spans spans{input, series.in_span(1, k), args.residual ? series.in_span(2, k) : nullptr,
                        find_dv(args, input)};
      sums[first_sum + k].add(is_first, sum_span<A, /*kAccumulators=*/2>(series.length, [&](auto position) {
                                return compute_terms(position, spans, constants);
                              }));
    }
  }

  // A row whose elements do not lie side by side is copied here. Such rows are summed one by one.
  struct Buffers {
    T input[kMaxSegmentLength], dy[kMaxSegmentLength], residual[kFromOutput ? 1 : kMaxSegmentLength];
  };
  Spans gather_row(int64_t row, int64_t first_channel, int64_t length, Buffers& buffers) const {
    const T* const input_row = input.address(row, first_channel, /*inner=*/0);
    return {input.gather(input_row, length, buffers.input),
            dy.gather(dy.address(row, first_channel, /*inner=*/0), length, buffers.dy),
            args.residual
                ? residual.gather(residual.address(row, first_channel, /*inner=*/0), length, buffers.residual)
                : nullptr,
            find_dv(args, input_row)};
  }

  // sum_dv[c], sum_dv_times_factor[c]: of the task's channel c, which is channel first_channel + c.
  void reduce_rows(const Task& task, double* sum_dv, double* sum_dv_times_factor) const {
    const int64_t first_channel = task.first_channel, length = task.end_channel - first_channel;
    // Adding several rows at once loads and stores the sums less often. With a transcendental activation that
    // gains nothing, since the activation takes much longer than those loads and stores.
    constexpr int kRowsAtOnce = is_transcendental(kActivation) ? 1 : 4;
    Buffers buffers;
    RowSums<A, kRowsAtOnce> sums;
    Spans rows[kRowsAtOnce];
    RowPrefetcher<T, kRowsAtOnce> input_prefetcher{input, length}, dy_prefetcher{dy, length};
    const Constants constants(args, first_channel);
    const bool has_unit_stride = input.has_unit_stride(length) && dy.has_unit_stride(length) &&
                                 (!args.residual || residual.has_unit_stride(length));
    for (int64_t begin = task.first_unit, end; begin < task.end_unit; begin = end) {
      end = find_chunk_end(begin, task.end_unit);  // a chunk: about 128 rows, summed in A
      sums.sum(
          length, begin, end, has_unit_stride,
          [&](int k, int64_t row) {
            rows[k] = gather_row(row, first_channel, length, buffers);
            if (k == 0) input_prefetcher.set_row(rows[0].input), dy_prefetcher.set_row(rows[0].dy);
          },
          [&](auto position, int k) {
            if (k == 0) input_prefetcher.prefetch(position), dy_prefetcher.prefetch(position);
            return compute_terms(position, rows[k], constants);
          });
      sums.for_each_channel(length, [&](int64_t c, A chunk_dv, A chunk_dv_times_factor) {
        sum_dv[c] += double(chunk_dv);
        sum_dv_times_factor[c] += double(chunk_dv_times_factor);
      });
    }
  }

  void run() const {
    for_each_task(args.layout, args.plan, [&](const Task& task) {
      double* sum_dv = args.slice_sums + task.slice * 2 * args.layout.channels;
      double* sum_dv_times_factor = sum_dv + args.layout.channels;
      for (int64_t c = task.first_channel; c < task.end_channel; ++c) sum_dv[c] = sum_dv_times_factor[c] = 0;
      if (kIsRows)
        reduce_rows(task, sum_dv + task.first_channel, sum_dv_times_factor + task.first_channel);
      else
        reduce_planes<A, T>(args, task, sum_dv, sum_dv_times_factor, sum_plane_series);
    });
  }
};

}  // namespace

void bn_reduce(const CpuBnBackwardParams& args) {
  dispatch_gradient<BnReduceKernel>(args);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
