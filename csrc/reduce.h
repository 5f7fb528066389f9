// The front end of bn_reduce and abn_reduce; see front_end.h.
#pragma once

#include <torch/csrc/stable/library.h>

#include "front_end.h"

namespace fastvit {

// The arguments of a backward kernel from what forward saved, without the layout.
template <class Args>
Args with_saved(const NormParams& norm, const Tensor& dy, const Tensor& saved) {
  Args args{checked(norm)};
  check_like(norm.op, "dy", dy, norm.input);
  check_packed(norm.op, "saved", saved, norm.input, 2 * norm.channels() + 2);
  args.input = norm.input.data_ptr();
  args.dy = dy.data_ptr();
  args.saved = saved.data_ptr();
  return args;
}

inline Layout reduce_layout(const NormParams& norm, const Tensor& dy) {
  return norm.z ? layout_of(norm.channel_dim, norm.input, dy, *norm.z)
                : layout_of(norm.channel_dim, norm.input, dy);
}

template <class Backend>
class ReduceOps {
  using Optional = OptionalTensor;
  using Text = std::string;

 public:
  static Tensor bn_reduce(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved,
                          const Optional& weight, const Optional& bias, const Text& activation, double param,
                          int64_t channel_dim, const Optional& exchange) {
    const NormParams norm = bn_params("bn_reduce", x, z, weight, bias, activation, param, channel_dim);
    return run(norm, dy, saved, exchange);
  }
  static Tensor abn_reduce(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& weight,
                           const Optional& bias, const Text& activation, double param, int64_t channel_dim,
                           const Optional& exchange) {
    return run(abn_params("abn_reduce", "y", y, weight, bias, activation, param, channel_dim), dy, saved,
               exchange);
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("bn_reduce", TORCH_BOX(&bn_reduce));
    m.impl("abn_reduce", TORCH_BOX(&abn_reduce));
  }

 private:
  static Tensor run(const NormParams& norm, const Tensor& dy, const Tensor& saved, const Optional& exchange) {
    auto args = with_saved<ReduceArgs>(norm, dy, saved);
    const int64_t numbers = 2 * norm.channels();
    Tensor sums = packed(norm.input, exchange ? 2 : 1, numbers);
    const auto shared = exchange_of(norm.op, exchange, sums, numbers, peer::kSums);
    args.layout = reduce_layout(norm, dy);
    args.sums = sums.data_ptr();
    args.exchange = shared ? &*shared : nullptr;
    Backend::reduce(args);
    return sums;
  }
};

}  // namespace fastvit
