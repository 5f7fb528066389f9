// The ops in plain double precision, one channel after the other: what the simulated kernels are compared
// with.
#pragma once

#include <cmath>
#include <vector>

#include "activation.h"

namespace fastvit::simulate {

using Values = std::vector<double>;

inline double act(Activation a, double v, double param) {
  switch (a) {
    case Activation::identity:
      return v;
    case Activation::relu:
      return v > 0 ? v : 0;
    case Activation::relu6:
      return v > 6 ? 6 : v > 0 ? v : 0;
    case Activation::leaky_relu:
      return v > 0 ? v : v * param;
    case Activation::elu:
      return v > 0 ? v : param * std::expm1(v);
    case Activation::gelu:
      return v * 0.5 * std::erfc(-v / std::sqrt(2.0));
    case Activation::gelu_tanh:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
    case Activation::silu:
      return v / (1 + std::exp(-v));
    case Activation::hardswish:
      return v * std::fmin(std::fmax(v + 3, 0), 6) / 6;
  }
  return NAN;
}

inline double slope(Activation a, double v, double param) {
  switch (a) {
    case Activation::identity:
      return 1;
    case Activation::relu:
      return v > 0;
    case Activation::relu6:
      return v > 0 && v < 6;
    case Activation::leaky_relu:
      return v > 0 ? 1 : param;
    case Activation::elu:
      return v > 0 ? 1 : param * std::exp(v);
    case Activation::hardswish:
      return v <= -3 ? 0 : v >= 3 ? 1 : v / 3 + 0.5;
    default: {  // smooth: the error of a central difference is some 1e-10
      const double h = 1e-5;
      return (act(a, v + h, param) - act(a, v - h, param)) / (2 * h);
    }
  }
}

inline double inverse(Activation a, double y, double param) {
  if (y > 0 || a == Activation::identity) return y;
  return a == Activation::elu ? std::log1p(y / param) : y / param;
}

struct Channel {  // of n values, n > 1
  double mean, m2, n, gamma, beta, eps;

  double invstd() const { return 1 / std::sqrt(m2 / n + eps); }
  double affine(double x) const { return (x - mean) * invstd() * gamma + beta; }
};

inline Channel measure(const Values& x, double gamma, double beta, double eps) {
  Channel c{0, 0, double(x.size()), gamma, beta, eps};
  for (double v : x) c.mean += v / c.n;
  for (double v : x) c.m2 += (v - c.mean) * (v - c.mean);
  return c;
}

struct Gradients {
  Values dx, dz;  // dz: before the activation
  double sum_dz = 0, sum_dz_xhat = 0;
};

// kept: x, and z where there is a residual; in place: y.
inline Gradients gradients(const Channel& c, bool in_place, const Values& kept, const Values& dy,
                           const Values& z, Activation a, double param) {
  Gradients g;
  Values xhat;
  for (size_t i = 0; i < kept.size(); ++i) {
    double v, hat;
    if (in_place) {
      v = inverse(a, kept[i], param);
      hat = std::fmax(std::fmin((v - c.beta) / c.gamma, std::sqrt(c.n - 1)), -std::sqrt(c.n - 1));
    } else {
      v = c.affine(kept[i]) + (z.empty() ? 0 : z[i]);
      hat = (kept[i] - c.mean) * c.invstd();
    }
    xhat.push_back(hat);
    g.dz.push_back(dy[i] * slope(a, v, param));
    g.sum_dz += g.dz[i];
    g.sum_dz_xhat += g.dz[i] * hat;
  }
  for (size_t i = 0; i < kept.size(); ++i)
    g.dx.push_back(c.gamma * c.invstd() * (g.dz[i] - g.sum_dz / c.n - xhat[i] * g.sum_dz_xhat / c.n));
  return g;
}

}  // namespace fastvit::simulate
