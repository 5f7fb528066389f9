// bn_reduce: sum dv and sum dv * centred per channel, see bn_gradient.h.
// Memory   reads x (or y), dy (and residual) once; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics a piece accumulates in the accumulation type, pieces in double, in a fixed order.
// Needs    from y: gamma != 0 and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "bn_gradient.h"
#include "sums.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

// Compiled once for all activations, whose plane_sums it calls by pointer.
template <class A, class T>
void planes(const BackwardParams& args, const Task& task, double* sum, double* weighted,
            void (*plane_sums)(const BackwardParams&, const Spans<T>&, int, bool, Terms<A>*)) {
  const Operand<T> in[] = {{args.input, args.layout, ReduceOperand::input},
                           {args.dy, args.layout, ReduceOperand::dy},
                           {args.residual, args.layout, ReduceOperand::residual}};
  sum_planes<A>(args, in, args.residual ? 3 : 2, task, plane_sums,
                [&](int, int64_t c, const Terms<A>& sums, int64_t, int64_t) {
                  sum[c] += double(sum_lanes<A>(sums.first));
                  weighted[c] += double(sum_lanes<A>(sums.second));
                });
}

template <class T, class A, bool kRows, bool kFromOutput, Activation kActivation>
struct Kernel {
  using Fn = ActivationFn<kActivation>;
  const BackwardParams& args;
  const Operand<T> input{args.input, args.layout, ReduceOperand::input},
      dy{args.dy, args.layout, ReduceOperand::dy},
      residual{args.residual, args.layout, ReduceOperand::residual};
  using Constants = GradientConstants<A, kRows>;

  struct Inputs {
    const T *input, *dy, *residual;
  };
  template <class At>
  static FASTVIT_INLINE Terms<A> terms(At at, const Inputs& in, const Constants& k) {
    const Gradient<A> g = k.template at<kFromOutput, Fn>(at, in.input, in.dy, in.residual);
    return {g.dv, g.dv * g.centred};
  }

  struct Buffers {
    T input[kPiece], dy[kPiece], residual[kFromOutput ? 1 : kPiece];
  };
  Inputs read(int64_t row, int64_t c, int64_t n, Buffers& buffers) const {
    return {
        input.read(input.at(input.outer(row), c, 0), n, buffers.input),
        dy.read(dy.at(dy.outer(row), c, 0), n, buffers.dy),
        args.residual ? residual.read(residual.at(residual.outer(row), c, 0), n, buffers.residual) : nullptr};
  }

  static void plane_sums(const BackwardParams& args, const Spans<T>& spans, int first, bool is_first,
                         Terms<A>* sums) {
    for (int k = 0; k < spans.count; ++k) {
      const Constants constants(args, spans.c + k);
      const Inputs in{spans.in(0, k), spans.in(1, k), args.residual ? spans.in(2, k) : nullptr};
      sums[first + k].add(is_first,
                          sum_plane<A, 2>(spans.n, [&](auto at) { return terms(at, in, constants); }));
    }
  }

  void rows(const Task& task, double* sum, double* weighted) const {
    const int64_t c0 = task.c0, n = task.c1 - c0;
    constexpr int kAtOnce = is_transcendental(kActivation) ? 1 : 4;  // those are compute-bound
    Buffers buffers;
    RowSums<A, kAtOnce> sums;
    Inputs in[kAtOnce];
    NextRows<T, kAtOnce> next_input{input, n}, next_dy{dy, n};
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
    for_each_task(args.layout, args.partition, [&](const Task& task) {
      double* sum = args.partial + task.slice * 2 * args.layout.C;
      double* weighted = sum + args.layout.C;
      for (int64_t c = task.c0; c < task.c1; ++c) sum[c] = weighted[c] = 0;
      if (kRows)
        rows(task, sum + task.c0, weighted + task.c0);
      else
        planes<A, T>(args, task, sum, weighted, plane_sums);
    });
  }
};

}  // namespace

void reduce(const BackwardParams& args) {
  dispatch_gradient<Kernel>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
