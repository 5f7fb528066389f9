// What reduce and backward share: the gradient before the activation, and what multiplies it in the second
// sum; from x, or in place from y.
//
//   kept      centred = x - mean; v = centred * scale + beta (+ z), exactly as the forward pass forms it, so
//             that the activation takes the same side; dz = dy * act'(v)
//   in place  centred = xhat, recovered from y; dz = dy * act'(v) from y
#pragma once

#include <cmath>

#include "channels.cuh"
#include "walk.cuh"

namespace fastvit {

enum class Kept { input, input_and_residual, output };

template <class A>
struct Saved {  // of the forward pass, and what is made of it
  int64_t C;
  const A* saved;  // mean[C], invstd[C], count
  PerChannel weight, bias;
  A floor;
  Activation activation;
  A param;

  __device__ __forceinline__ A invstd(int64_t c) const { return saved[C + c]; }
  __device__ __forceinline__ double count() const { return load_count(saved + 2 * C); }
  __device__ __forceinline__ A limit() const {  // of |xhat|
    const double n = count();
    return A(std::sqrt(n > 1 ? n - 1 : 0));
  }
  __device__ __forceinline__ A gamma(int64_t c) const { return gamma_of(weight, floor, c); }
};

// One channel's constants; what stands for what depends on what was kept.
template <class A, Kept kKept>
struct Constants {
  A mean_or_inverse_gamma, scale, beta;

  __device__ __forceinline__ static Constants of(const Saved<A>& s, int64_t c) {
    const A gamma = s.gamma(c);
    return {kKept == Kept::output ? A(1) / gamma : s.saved[c], gamma * s.invstd(c), A(s.bias.read(c, 0))};
  }
};

template <class A>
struct Gradient {
  A dz, centred;
};

template <class Fn, Kept kKept, class A>
__device__ __forceinline__ Gradient<A> gradient(A input, A dy, A z, const Constants<A, kKept>& k, A param,
                                                A limit) {
  if constexpr (kKept == Kept::output) {
    return {Fn::backward_y(dy, input, param),
            recover_xhat(Fn::inverse(input, param), k.beta, k.mean_or_inverse_gamma, limit)};
  } else {
    const A centred = input - k.mean_or_inverse_gamma;
    A v = centred * k.scale + k.beta;
    if constexpr (kKept == Kept::input_and_residual) v += z;
    return {Fn::backward(dy, v, param), centred};
  }
}

}  // namespace fastvit
