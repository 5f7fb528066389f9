// bn_reduce, abn_reduce: sum dz and sum dz*xhat per channel; dz = dy * act'(v), v the pre-activation.
// Memory   reads x (or y), dy (and z) once; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics a piece accumulates in the accumulation type, pieces in double, in a fixed order. From x the
//          second sum is of dz * (x - mean); the caller multiplies by invstd. From y, xhat is recovered.
// Needs    in place: gamma != 0 and an invertible activation.
// Source   arXiv:1712.02616, section 3.
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class A>
struct Terms {  // the terms of one vector of elements in the two sums
  Vector<A> dz, weighted;
};

template <class A, bool kInPlace, bool kResidual, Activation kActivation>
FASTVIT_INLINE Terms<A> terms(Vector<A> input, Vector<A> dy, Vector<A> z, Vector<A> mean, Vector<A> scale,
                              Vector<A> beta, Vector<A> inverse_gamma, A limit, A param) {
  using Fn = ActivationFn<kActivation>;
  if constexpr (kInPlace) {
    const Vector<A> dz = Fn::backward_y(dy, input, param);
    return {dz, dz * recover_xhat(Fn::inverse(input, param), beta, inverse_gamma, limit)};
  } else {
    const Vector<A> t = input - mean;
    Vector<A> v = t * scale + beta;
    if (kResidual) v += z;
    const Vector<A> dz = Fn::backward(dy, v, param);
    return {dz, dz * t};
  }
}

template <class T, class A, bool kRows, bool kInPlace, bool kResidual, Activation kActivation>
struct Kernel {
  static constexpr int L = kLanes<A>;
  const ReduceParams& args;
  const Activations<T> input{args.input, args.layout, 0}, dy{args.dy, args.layout, 1},
      z{args.z, args.layout, 2};
  const A limit = A(args.limit), param = A(args.activation_param);

  using Constant = PerChannel<A, kRows>;
  struct Constants {
    Constant mean, scale, beta, inverse_gamma;
    Constants(const ReduceParams& args, int64_t c)
        : mean(kInPlace ? args.beta : args.mean, c),
          scale(kInPlace ? args.beta : args.scale, c),
          beta(args.beta, c),
          inverse_gamma(kInPlace ? args.inverse_gamma : args.beta, c) {}
  };

  FASTVIT_INLINE Terms<A> at(const T* x, const T* g, const T* r, const Constants& k, int64_t i) const {
    return terms<A, kInPlace, kResidual, kActivation>(
        load<A>(x + i), load<A>(g + i), kResidual ? load<A>(r + i) : Vector<A>{}, k.mean.at(i), k.scale.at(i),
        k.beta.at(i), k.inverse_gamma.at(i), limit, param);
  }
  FASTVIT_INLINE Terms<A> some(const T* x, const T* g, const T* r, const Constants& k, int64_t i,
                               int n) const {
    // Lanes past the end hold dy = 0 and a finite input, so they add nothing.
    return terms<A, kInPlace, kResidual, kActivation>(
        load_some<A>(x + i, n), load_some<A>(g + i, n), kResidual ? load_some<A>(r + i, n) : Vector<A>{},
        k.mean.some(i, n), k.scale.some(i, n), k.beta.some(i, n), k.inverse_gamma.some(i, n), limit, param);
  }

  void planes(int64_t first, int64_t last, int64_t c0, int64_t c1, double* sum, double* weighted) const {
    T x_buffer[kPiece], dy_buffer[kPiece], z_buffer[kResidual ? kPiece : 1];
    const Partition& partition = args.partition;
    for (int64_t begin = first, end; begin < last; begin = end) {  // the steps of one plane, for each channel
      const int64_t outer = begin / partition.pieces;
      end = (outer + 1) * partition.pieces < last ? (outer + 1) * partition.pieces : last;
      const int64_t at_x = input.outer(outer), at_dy = dy.outer(outer), at_z = kResidual ? z.outer(outer) : 0;
      for (int64_t c = c0; c < c1; ++c)
        for (int64_t step = begin; step < end; ++step) {
          const int64_t s = step % partition.pieces * partition.piece;
          const int64_t n = args.layout.S - s < partition.piece ? args.layout.S - s : partition.piece;
          const T* x = input.read(input.at(at_x, c, s), n, x_buffer);
          const T* g = dy.read(dy.at(at_dy, c, s), n, dy_buffer);
          const T* r = kResidual ? z.read(z.at(at_z, c, s), n, z_buffer) : nullptr;
          const Constants k(args, c);
          Vector<A> a[2] = {}, b[2] = {};
          int64_t i = 0;
          for (; i + 2 * L <= n; i += 2 * L)
            for (int u = 0; u < 2; ++u) {
              const Terms<A> t = at(x, g, r, k, i + u * L);
              a[u] += t.dz;
              b[u] += t.weighted;
            }
          for (; i < n; i += L) {
            const Terms<A> t = i + L <= n ? at(x, g, r, k, i) : some(x, g, r, k, i, int(n - i));
            a[0] += t.dz;
            b[0] += t.weighted;
          }
          sum[c] += double(sum_lanes<A>(a[0] + a[1]));
          weighted[c] += double(sum_lanes<A>(b[0] + b[1]));
        }
    }
  }

  static constexpr int64_t kGroup = 64;  // rows summed in the accumulation type, before the sum in double

  void rows(int64_t first, int64_t last, int64_t c0, int64_t n, double* sum, double* weighted) const {
    T x_buffer[kPiece], dy_buffer[kPiece], z_buffer[kResidual ? kPiece : 1];
    A a[kPiece + L], b[kPiece + L];  // padded to whole vectors
    const Constants k(args, c0);
    for (int64_t begin = first; begin < last; begin += kGroup) {
      const int64_t end = begin + kGroup < last ? begin + kGroup : last;
      for (int64_t i = 0; i < n + L; ++i) a[i] = b[i] = 0;
      for (int64_t row = begin; row < end; ++row) {
        const T* x = input.read(input.at(input.outer(row), c0, 0), n, x_buffer);
        const T* g = dy.read(dy.at(dy.outer(row), c0, 0), n, dy_buffer);
        const T* r = kResidual ? z.read(z.at(z.outer(row), c0, 0), n, z_buffer) : nullptr;
        for (int64_t i = 0; i < n; i += L) {
          const Terms<A> t = i + L <= n ? at(x, g, r, k, i) : some(x, g, r, k, i, int(n - i));
          store<A>(a + i, load<A>(a + i) + t.dz);
          store<A>(b + i, load<A>(b + i) + t.weighted);
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        sum[i] += double(a[i]);
        weighted[i] += double(b[i]);
      }
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
                      planes(first, last, c0, c1, sum, weighted);
                  });
  }
};

template <class T, class A>
struct Reduce {
  static void run(const ReduceParams& args) { dispatch_gradient<Kernel, T, A>(args); }
};

}  // namespace

void reduce(const ReduceParams& args) {
  dispatch_dtype<Reduce>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
