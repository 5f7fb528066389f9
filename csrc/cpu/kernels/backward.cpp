// bn_backward, abn_backward: dx = scale * (dz - a - b * (x - mean)), in place scale * (dz - a - b * xhat),
// with a and b from the sums over all ranks; dz = dy * act'(v) is written too if a residual was added.
// Memory   reads x (or y), dy (and z) once; writes dx (and dz) once.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics v has the same bits as in the forward pass, so the activation is on the same side of its kink.
// Needs    in place: gamma != 0 and an invertible activation.
// Source   Ioffe, Szegedy, arXiv:1502.03167, section 3; in place: arXiv:1712.02616, section 3.
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class A>
struct Gradients {
  Vector<A> dx, dz;
};

template <class T, class A, bool kRows, bool kInPlace, bool kResidual, Activation kActivation>
struct Kernel {
  using Fn = ActivationFn<kActivation>;
  const BackwardParams& args;

  struct Constants {
    using Constant = PerChannel<A, kRows>;
    Constant mean, scale, beta, inverse_gamma, a, b;
    A limit, param;
    Constants(const BackwardParams& args, int64_t c)
        : mean(kInPlace ? args.beta : args.saved, c),
          scale(args.scale, c),
          beta(args.beta, c),
          inverse_gamma(kInPlace ? args.inverse_gamma : args.beta, c),
          a(args.a, c),
          b(args.b, c),
          limit(A(args.limit)),
          param(A(args.activation_param)) {}
  };

  template <class Place>
  static FASTVIT_INLINE Gradients<A> gradients(Place at, const T* x, const T* g, const T* r,
                                               const Constants& k) {
    const Vector<A> input = at.load(x), dy = at.load(g), scale = k.scale.at(at);
    if constexpr (kInPlace) {
      const Vector<A> dz = Fn::backward_y(dy, input, k.param);
      const Vector<A> xhat =
          recover_xhat(Fn::inverse(input, k.param), k.beta.at(at), k.inverse_gamma.at(at), k.limit);
      return {scale * (dz - k.a.at(at) - xhat * k.b.at(at)), dz};
    } else {
      const Vector<A> t = input - k.mean.at(at);
      Vector<A> v = t * scale + k.beta.at(at);
      if (kResidual) v += at.load(r);
      const Vector<A> dz = Fn::backward(dy, v, k.param);
      return {scale * (dz - k.a.at(at) - t * k.b.at(at)), dz};
    }
  }

  static void span(const T* x, const T* g, const T* r, T* dx, T* dr, int64_t n, const Constants& k) {
    for_each_vector<A>(
        n, [&](auto at) { return gradients(at, x, g, r, k); },
        [&](auto at, const Gradients<A>& out) {
          at.store(dx, out.dx);
          if (kResidual) at.store(dr, out.dz);
        });
  }

  void run() const {
    const Activations<T> input(args.input, args.layout, 0), dy(args.dy, args.layout, 1),
        dx(args.dx, args.layout, 2), z(args.z, args.layout, 3), dz(args.dz, args.layout, 4);
    torch::stable::parallel_for(
        0, positions(args.layout, args.partition), grain_of(args.partition.piece),
        [&](int64_t begin, int64_t end) {
          T x_buffer[kPiece], dy_buffer[kPiece], dx_buffer[kPiece], z_buffer[kResidual ? kPiece : 1],
              dz_buffer[kResidual ? kPiece : 1];
          for_each_piece(
              args.layout, args.partition, begin, end, [&](int64_t n, int64_t c, int64_t s, int64_t length) {
                const T* x = input.read(input.at(input.outer(n), c, s), length, x_buffer);
                const T* g = dy.read(dy.at(dy.outer(n), c, s), length, dy_buffer);
                const T* r = kResidual ? z.read(z.at(z.outer(n), c, s), length, z_buffer) : nullptr;
                T* out = dx.at(dx.outer(n), c, s);
                T* residual = kResidual ? dz.at(dz.outer(n), c, s) : nullptr;
                span(x, g, r, dx.target(out, length, dx_buffer),
                     kResidual ? dz.target(residual, length, dz_buffer) : nullptr, length,
                     Constants(args, c));
                dx.written(out, length, dx_buffer);
                if (kResidual) dz.written(residual, length, dz_buffer);
              });
        });
  }
};

template <class T, class A>
struct Backward {
  static void run(const BackwardParams& args) { dispatch_gradient<Kernel, T, A>(args); }
};

}  // namespace

void backward(const BackwardParams& args) {
  dispatch_dtype<Backward>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
