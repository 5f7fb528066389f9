// bn_forward, bn_apply, abn_forward_: y = act((x - mean) * scale + beta (+ z)), scale = gamma * invstd.
// Memory   reads x (and z) once, writes y once, over x or to a new tensor.
// Mapping  span by span in the order of memory; threads take contiguous ranges.
// Numerics the mean is subtracted first, so a mean much larger than the deviation loses no digits.
// Source   Ioffe, Szegedy, arXiv:1502.03167; in place: arXiv:1712.02616.
#include "walk.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {
namespace {

template <class T, class A, bool kRows, bool kResidual, Activation kActivation>
void forward_span(const T* x, const T* z, T* y, int64_t n, int64_t c, const ForwardParams& args) {
  const PerChannel<A, kRows> mean(args.mean, c), scale(args.scale, c), beta(args.beta, c);
  const A param = A(args.activation_param);
  for_each_vector<A>(
      n,
      [&](auto at) {
        Vector<A> v = (at.load(x) - mean.at(at)) * scale.at(at) + beta.at(at);
        if (kResidual) v += at.load(z);
        return ActivationFn<kActivation>::forward(v, param);
      },
      [&](auto at, Vector<A> result) { at.store(y, result); });
}

template <class T, class A>
struct Forward {
  static void run(const ForwardParams& args) {
    dispatch_activation(args.activation, [&]<Activation kActivation>() {
      if (args.layout.rows)
        args.z ? walk<true, true, kActivation>(args) : walk<true, false, kActivation>(args);
      else
        args.z ? walk<false, true, kActivation>(args) : walk<false, false, kActivation>(args);
    });
  }

  template <bool kRows, bool kResidual, Activation kActivation>
  static void walk(const ForwardParams& args) {
    const Activations<T> x(args.x, args.layout, 0), y(args.y, args.layout, 1), z(args.z, args.layout, 2);
    torch::stable::parallel_for(
        0, positions(args.layout, args.partition), grain_of(args.partition.piece),
        [&](int64_t begin, int64_t end) {
          T x_buffer[kPiece], y_buffer[kPiece], z_buffer[kResidual ? kPiece : 1];
          for_each_piece(args.layout, args.partition, begin, end,
                         [&](int64_t n, int64_t c, int64_t s, int64_t length) {
                           T* out = y.at(y.outer(n), c, s);
                           forward_span<T, A, kRows, kResidual, kActivation>(
                               x.read(x.at(x.outer(n), c, s), length, x_buffer),
                               kResidual ? z.read(z.at(z.outer(n), c, s), length, z_buffer) : nullptr,
                               y.target(out, length, y_buffer), length, c, args);
                           y.written(out, length, y_buffer);
                         });
        });
  }
};

}  // namespace

void forward(const ForwardParams& args) {
  dispatch_dtype<Forward>(args);
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
