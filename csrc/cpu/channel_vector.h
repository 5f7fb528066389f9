// What the O(C) part of the ops on the CPU has in common: parameters as numbers, in double.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "../batch_norm.h"

namespace fastvit {

inline double load_channel(const ChannelVector& t, int64_t c, double absent) {
  if (!t.data) return absent;
  return dispatch_storage_type<c10::Half, c10::BFloat16>(
      t.dtype, [&]<class T>() { return double(Accumulation<T>(static_cast<const T*>(t.data)[c])); });
}

inline void store_channel(const ChannelVector& t, int64_t c, double value) {
  dispatch_storage_type<c10::Half, c10::BFloat16>(
      t.dtype, [&]<class T>() { static_cast<T*>(t.data)[c] = T(Accumulation<T>(value)); });
}

// gamma, with a floor where x is recovered from y.
inline double floored_gamma(const BnArgs& args, int64_t c, bool invertible) {
  return effective_gamma(load_channel(args.weight, c, 1), load_channel(args.bias, c, 0),
                         gamma_floor<double>(invertible, args.dtype));
}

}  // namespace fastvit
