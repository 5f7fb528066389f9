// The moments of a channel, how moments of two sets of values merge, how a tensor holds their count, and the
// floor of gamma.
//
// moments: a tensor of mean[C], M2[C] and the count. M2 is the sum of squared deviations from the mean; the
//          count is the number of values of each channel.
// saved:   a tensor of mean[C], invstd[C] and the count, which a batch norm's forward keeps for its backward.
//          invstd is 1 / sqrt(var + eps). var is M2 / count, or running_var; the count is then infinite.
// Both have 2C + 2 numbers of one type, float, or double for activations of double. The last two numbers are
// the count, as high * 2^24 + low, since one float is exact only up to 2^24.
//
// Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances" (1979). No sum of squares is formed, since E[x^2] - E[x]^2 cancels where the mean is large.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace fastvit {

constexpr double kCountRadix = 16777216.0;  // 2^24

template <class A>
FASTVIT_HOST_DEVICE void pack_count(A* high_and_low, double count) {
  const double high = floor(count / kCountRadix);
  high_and_low[0] = A(high);
  high_and_low[1] = A(count - high * kCountRadix);
}

// Count: type of the result. double is exact. Some CUDA kernels of float use float, which rounds the count,
// because graphics cards are slow in double.
// A: type of the packed numbers.
template <class Count = double, class A>
FASTVIT_HOST_DEVICE Count unpack_count(const A* high_and_low) {
  return Count(high_and_low[0]) * Count(kCountRadix) + Count(high_and_low[1]);
}

// A: accumulation type. Count: type of the number of values.
template <class A, class Count = double>
struct Moments {
  Count count;
  A mean, m2;
};

// merge() merges the moments of another set of values into mean and m2, those of a set of `count` values. The
// members depend only on the two counts, so one MergeWeights serves all channels.
struct MergeWeights {
  double other_share = 0;   // other_count / (count + other_count)
  double delta_weight = 0;  // count * other_count / (count + other_count)

  FASTVIT_HOST_DEVICE static MergeWeights from_counts(double count, double other_count) {
    const double other_share = other_count > 0 ? other_count / (count + other_count) : 0;
    return {other_share, count * other_share};
  }
  FASTVIT_HOST_DEVICE void merge(double& mean, double& m2, double other_mean, double other_m2) const {
    const double delta = other_mean - mean;
    mean += delta * other_share;
    m2 += other_m2 + delta * delta * delta_weight;
  }
};

// Backward of an invertible forward divides by gamma to recover x from y. So |gamma| must not be below
// max(min_magnitude, beta_factor * |beta|), its floor; effective_gamma raises it to that.
template <class A>
struct GammaFloor {
  A min_magnitude = 0;  // keeps 1 / gamma and gamma * xhat in the range of the storage type
  // Let u be the relative error of a rounding. If |beta| is large, the rounding of y makes an error of about
  // u * |beta|, and the recovered xhat has an error of u * |beta| / |gamma|. beta_factor = 2^7 u keeps the
  // error of xhat below 2^-7.
  A beta_factor = 0;
};

template <class A>
FASTVIT_HOST_DEVICE A effective_gamma(A gamma, A beta, const GammaFloor<A>& floor) {
  const A magnitude = gamma < 0 ? -gamma : gamma;
  const A min_for_beta = floor.beta_factor * (beta < 0 ? -beta : beta);
  const A bound = min_for_beta > floor.min_magnitude ? min_for_beta : floor.min_magnitude;
  // The comparison is false for a NaN, which stays NaN. copysign keeps the sign of a gamma of -0.
  return magnitude < bound ? std::copysign(bound, gamma) : gamma;
}

}  // namespace fastvit
