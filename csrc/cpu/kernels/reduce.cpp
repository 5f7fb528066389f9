// bn_reduce, abn_reduce: sum dz and sum dz * centred per channel, see gradient.h.
// Memory   reads x (or y), dy (and z) once; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics a piece accumulates in the accumulation type, pieces in double, in a fixed order.
// Needs    in place: gamma != 0 and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "gradient.h"
#include "sums.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

// Compiled once for all activations, whose plane_sums it calls by pointer.
template <class A, class T>
void planes(const ReduceParams& args, int64_t first, int64_t last, int64_t c0, int64_t c1, double* sum,
            double* weighted,
            void (*plane_sums)(const ReduceParams&, const Spans<T>&, int, bool, Terms<A>*)) {
  const Operand<T> in[] = {{args.input, args.layout, 0}, {args.dy, args.layout, 1}, {args.z, args.layout, 2}};
  sum_planes<A>(args, in, args.z ? 3 : 2, first, last, c0, c1, plane_sums,
                [&](int, int64_t c, const Terms<A>& sums, int64_t, int64_t) {
                  sum[c] += double(sum_lanes<A>(sums.first));
                  weighted[c] += double(sum_lanes<A>(sums.second));
                });
}

template <class T, class A, bool kRows, bool kInPlace, Activation kActivation>
struct Kernel {
  using Fn = ActivationFn<kActivation>;
  const ReduceParams& args;
  const Operand<T> input{args.input, args.layout, 0}, dy{args.dy, args.layout, 1}, z{args.z, args.layout, 2};
  using Constants = GradientConstants<A, kRows>;

  struct Inputs {
    const T *x, *dy, *z;
  };
  template <class At>
  static FASTVIT_INLINE Terms<A> terms(At at, const Inputs& in, const Constants& k) {
    const Gradient<A> g = k.template at<kInPlace, Fn>(at, in.x, in.dy, in.z);
    return {g.dz, g.dz * g.centred};
  }

  struct Buffers {
    T x[kPiece], dy[kPiece], z[kInPlace ? 1 : kPiece];
  };
  Inputs read(int64_t row, int64_t c, int64_t n, Buffers& buffers) const {
    return {input.read(input.at(input.outer(row), c, 0), n, buffers.x),
            dy.read(dy.at(dy.outer(row), c, 0), n, buffers.dy),
            args.z ? z.read(z.at(z.outer(row), c, 0), n, buffers.z) : nullptr};
  }

  static void plane_sums(const ReduceParams& args, const Spans<T>& spans, int first, bool is_first,
                         Terms<A>* sums) {
    for (int k = 0; k < spans.count; ++k) {
      const Constants constants(args, spans.c + k);
      const Inputs in{spans.in(0, k), spans.in(1, k), args.z ? spans.in(2, k) : nullptr};
      sums[first + k].add(is_first,
                          sum_plane<A, 2>(spans.n, [&](auto at) { return terms(at, in, constants); }));
    }
  }

  void rows(int64_t first, int64_t last, int64_t c0, int64_t n, double* sum, double* weighted) const {
    constexpr int kAtOnce = is_transcendental(kActivation) ? 1 : 4;  // those are compute-bound
    Buffers buffers;
    RowSums<A, kAtOnce> sums;
    Inputs in[kAtOnce];
    NextRows<T, kAtOnce> next_input{input, n}, next_dy{dy, n};
    const Constants constants(args, c0);
    const bool unit_stride =
        input.has_unit_stride(n) && dy.has_unit_stride(n) && (!args.z || z.has_unit_stride(n));
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = chunk_end(begin, last);
      sums.sum(
          n, begin, end, unit_stride,
          [&](int k, int64_t row) {
            in[k] = read(row, c0, n, buffers);
            if (k == 0) next_input.after(in[0].x), next_dy.after(in[0].dy);
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
    for_each_task(args.layout, args.partition,
                  [&](int64_t slice, int64_t first, int64_t last, int64_t c0, int64_t c1) {
                    double* sum = args.partial + slice * 2 * args.layout.C;
                    double* weighted = sum + args.layout.C;
                    for (int64_t c = c0; c < c1; ++c) sum[c] = weighted[c] = 0;
                    if (kRows)
                      rows(first, last, c0, c1 - c0, sum + c0, weighted + c0);
                    else
                      planes<A, T>(args, first, last, c0, c1, sum, weighted, plane_sums);
                  });
  }
};

}  // namespace

void reduce(const ReduceParams& args) {
  dispatch_gradient<Kernel>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
