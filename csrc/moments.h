// Moments of one channel, and their packed form.
//
// A packed `moments` tensor holds mean[C], M2[C] (sum of squared deviations from the mean) and the count
// of values per channel; a packed `saved` tensor holds mean[C], invstd[C] and the count. Both are 2C + 2
// numbers of the accumulation type. The count takes the last two, high * 2^24 + low, and so is exact in float
// beyond 2^24. Ranks exchange this one buffer.
//
// Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances" (1979). No sum of squares is formed.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace fastvit {

constexpr double kCountRadix = 16777216.0;  // 2^24

template <class A>
FASTVIT_HOST_DEVICE void pack_count(A* two, double count) {
  const double high = floor(count / kCountRadix);
  two[0] = A(high);
  two[1] = A(count - high * kCountRadix);
}

// Exact in double; a GPU's kernels of float round it, because graphics cards have few units for double.
template <class Count = double, class A>
FASTVIT_HOST_DEVICE Count unpack_count(const A* two) {
  return Count(two[0]) * Count(kCountRadix) + Count(two[1]);
}

template <class A, class Count = double>
struct Moments {
  Count count;
  A mean, m2;
};

// The weights by which the moments of `other` values merge into those of `count`; the same for all channels.
struct MergeWeights {
  double fraction = 0, weight = 0;

  FASTVIT_HOST_DEVICE static MergeWeights of_counts(double count, double other) {
    const double fraction = other > 0 ? other / (count + other) : 0;
    return {fraction, count * fraction};
  }
  FASTVIT_HOST_DEVICE void merge(double& mean, double& m2, double other_mean, double other_m2) const {
    const double delta = other_mean - mean;
    mean += delta * fraction;
    m2 += other_m2 + delta * delta * weight;
  }
};

// The floor of |gamma| in place, where the inversion divides by it.
template <class A>
struct GammaFloor {
  A absolute = 0;  // so that 1/gamma and gamma * xhat do not leave the range of the storage type
  // Factor of |beta|. y is rounded at the size of |beta|, so the recovered xhat has an error of
  // u |beta| / |gamma|, u the rounding. With relative = 2^7 u this is at most 2^-7.
  A relative = 0;
};

template <class A>
FASTVIT_HOST_DEVICE A effective_gamma(A gamma, A beta, const GammaFloor<A>& floor) {
  const A magnitude = gamma < 0 ? -gamma : gamma;
  const A wanted = floor.relative * (beta < 0 ? -beta : beta);
  const A least = wanted > floor.absolute ? wanted : floor.absolute;
  // The comparison is false for NaN, which stays NaN; copysign keeps the sign of -0.
  return magnitude < least ? std::copysign(least, gamma) : gamma;
}

}  // namespace fastvit
