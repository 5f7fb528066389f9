// bn_reduce: sum dv and sum dv * centred per channel, see bn_gradient.h.
// Memory   reads x (or y), dy (and residual) once; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics a piece accumulates in the accumulation type, pieces in double, in a fixed order.
// Needs    from y: gamma != 0 and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "bn_gradient.h"
#include "sums.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

// Compiled once for all activations, whose plane_sums it calls by pointer.
template <class A, class T>
void planes(const CpuBnBackwardParams& args, const Task& task, double* sum, double* weighted,
            void (*plane_sums)(const CpuBnBackwardParams&, const SpanGroup<T>&, int, bool, TermPair<A>*)) {
  const StridedOperand<T> in[] = {{args.input, args.layout, ReduceStrides::input},
                                  {args.dy, args.layout, ReduceStrides::dy},
                                  {args.residual, args.layout, ReduceStrides::residual}};
  sum_planes<A>(args, in, args.residual ? 3 : 2, task, plane_sums,
                [&](int, int64_t c, const TermPair<A>& sums, int64_t, int64_t) {
                  sum[c] += double(sum_lanes<A>(sums.first));
                  weighted[c] += double(sum_lanes<A>(sums.second));
                });
}

template <class T, class A, bool kIsRows, bool kFromOutput, Activation kActivation>
struct Kernel {
  using Fn = ActivationFunction<kActivation>;
  const CpuBnBackwardParams& args;
  const StridedOperand<T> input{args.input, args.layout, ReduceStrides::input},
      dy{args.dy, args.layout, ReduceStrides::dy},
      residual{args.residual, args.layout, ReduceStrides::residual};
  using Constants = BnGradientConstants<A, kIsRows>;

  struct Inputs {
    const T *input, *dy, *residual;
  };
  template <class Position>
  static FASTVIT_HOST_DEVICE TermPair<A> terms(Position at, const Inputs& in, const Constants& k) {
    const Gradient<A> g = k.template at<kFromOutput, Fn>(at, in.input, in.dy, in.residual);
    return {g.dv, g.dv * g.centred};
  }

  struct Buffers {
    T input[kMaxSegment], dy[kMaxSegment], residual[kFromOutput ? 1 : kMaxSegment];
  };
  Inputs read(int64_t row, int64_t c, int64_t n, Buffers& buffers) const {
    return {
        input.read(input.at(input.outer(row), c, 0), n, buffers.input),
        dy.read(dy.at(dy.outer(row), c, 0), n, buffers.dy),
        args.residual ? residual.read(residual.at(residual.outer(row), c, 0), n, buffers.residual) : nullptr};
  }

  static void plane_sums(const CpuBnBackwardParams& args, const SpanGroup<T>& spans, int first, bool is_first,
                         TermPair<A>* sums) {
    for (int k = 0; k < spans.count; ++k) {
      const Constants constants(args, spans.c + k);
      const Inputs in{spans.in(0, k), spans.in(1, k), args.residual ? spans.in(2, k) : nullptr};
      sums[first + k].add(is_first,
                          sum_plane<A, 2>(spans.n, [&](auto at) { return terms(at, in, constants); }));
    }
  }

  void rows(const Task& task, double* sum, double* weighted) const {
    const int64_t c0 = task.c0, n = task.c1 - c0;
    constexpr int kRowsAtOnce = is_transcendental(kActivation) ? 1 : 4;  // those are compute-bound
    Buffers buffers;
    RowSums<A, kRowsAtOnce> sums;
    Inputs in[kRowsAtOnce];
    RowPrefetcher<T, kRowsAtOnce> next_input{input, n}, next_dy{dy, n};
    const Constants constants(args, c0);
    const bool unit_stride =
        input.has_unit_stride(n) && dy.has_unit_stride(n) && (!args.residual || residual.has_unit_stride(n));
    for (int64_t begin = task.first, end; begin < task.last; begin = end) {
      end = chunk_end(begin, task.last);
      sums.sum(
          n, begin, end, unit_stride,
          [&](int k, int64_t row) {
            in[k] = read(row, c0, n, buffers);
            if (k == 0) next_input.after(in[0].input), next_dy.after(in[0].dy);
          },
          [&](auto at, int k) {
            if (k == 0) next_input.fetch(at), next_dy.fetch(at);
            return terms(at, in[k], constants);
          });
      sums.for_each_channel(n, [&](int64_t c, A a, A b) {
        sum[c] += double(a);
        weighted[c] += double(b);
      });
    }
  }

  void run() const {
    for_each_task(args.layout, args.plan, [&](const Task& task) {
      double* sum = args.partial + task.slice * 2 * args.layout.channels;
      double* weighted = sum + args.layout.channels;
      for (int64_t c = task.c0; c < task.c1; ++c) sum[c] = weighted[c] = 0;
      if (kIsRows)
        rows(task, sum + task.c0, weighted + task.c0);
      else
        planes<A, T>(args, task, sum, weighted, plane_sums);
    });
  }
};

}  // namespace

void bn_reduce(const CpuBnBackwardParams& args) {
  dispatch_gradient<Kernel>(args);
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
