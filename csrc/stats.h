// The front end of bn_stats: checks, allocation and the backend's arguments; see front_end.h.
#pragma once

#include <torch/csrc/stable/library.h>

#include "front_end.h"

namespace fastvit {

template <class Backend>
class StatsOps {
 public:
  static Tensor bn_stats(const Tensor& x, int64_t channel_dim, const OptionalTensor& exchange) {
    check_input("bn_stats", "x", x, channel_dim);
    const int64_t numbers = 2 * x.size(channel_dim) + 2;
    Tensor moments = packed(x, numbers);
    const auto shared = exchange_of("bn_stats", exchange, moments, numbers, peer::kMoments);
    run(x, channel_dim, moments, shared ? &*shared : nullptr);
    return moments;
  }

  // Writes the moments of a checked x.
  static void run(const Tensor& x, int64_t channel_dim, const Tensor& moments,
                  const peer::Exchange* exchange) {
    Backend::stats({.layout = layout_of(channel_dim, x),
                    .dtype = x.scalar_type(),
                    .device = x.get_device_index(),
                    .x = x.data_ptr(),
                    .moments = moments.data_ptr(),
                    .exchange = exchange});
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("bn_stats", TORCH_BOX(&bn_stats));
  }
};

}  // namespace fastvit
