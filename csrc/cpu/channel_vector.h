// Reads and writes the numbers of a ChannelVector (a parameter or buffer with one number per channel, or per
// column of a LayerNorm) as double. Half and BFloat16 convert by way of their accumulation type, float.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "../batch_norm.h"

namespace fastvit {

// value_if_null: what is returned if the vector has no data, that is, if the parameter was not given.
inline double load_channel(const ChannelVector& vector, int64_t channel, double value_if_null) {
  if (!vector.data) return value_if_null;
  return dispatch_storage_type<c10::Half, c10::BFloat16>(vector.dtype, [&]<class T>() {
    return double(Accumulation<T>(static_cast<const T*>(vector.data)[channel]));
  });
}

inline void store_channel(const ChannelVector& vector, int64_t channel, double value) {
  dispatch_storage_type<c10::Half, c10::BFloat16>(
      vector.dtype, [&]<class T>() { static_cast<T*>(vector.data)[channel] = T(Accumulation<T>(value)); });
}

// Returns gamma. With `invertible`, |gamma| is raised to a floor, because recovering x from y divides by
// gamma. In float and double the floor grows with |bias|, because a large bias makes the rounding error of y
// large, and that error is divided by gamma (moments.h).
inline double floored_gamma(const BnArgs& args, int64_t channel, bool invertible) {
  return effective_gamma(load_channel(args.weight, channel, /*value_if_null=*/1),
                         load_channel(args.bias, channel, /*value_if_null=*/0),
                         gamma_floor<double>(invertible, args.dtype));
}

}  // namespace fastvit
