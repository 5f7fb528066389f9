// The front ends of bn_reduce, abn_reduce, bn_backward and abn_backward; see front_end.h.
//
// Without sums a training backward makes its own. A backend may do that in the same pass, or return false.
#pragma once

#include <tuple>

#include "front_end.h"

namespace fastvit {

// The arguments of a backward kernel from what forward saved, without the layout.
template <class Args>
Args gradient_args(const NormCall& norm, const Tensor& dy, const Tensor& saved) {
  Args args{checked(norm)};
  check_like(norm.op, "dy", dy, norm.input);
  check_packed(norm.op, "saved", saved, norm.input, 2 * norm.channels() + 2);
  args.input = norm.input.data_ptr();
  args.dy = dy.data_ptr();
  args.saved = saved.data_ptr();
  return args;
}

inline Tensor sums_of(const NormCall& norm, const Tensor& dy, const Tensor& saved, const Optional& exchange) {
  auto args = gradient_args<ReduceArgs>(norm, dy, saved);
  const int64_t numbers = 2 * norm.channels();
  Tensor sums = packed(norm.input, exchange ? 2 : 1, numbers);
  const auto peers = optional_exchange(norm.op, exchange, sums, numbers, peer::kSums);
  args.layout = layout_of(norm.channel_dim, {&norm.input, &dy, pointer(norm.z)});
  args.sums = sums.data_ptr();
  args.exchange = peers ? &*peers : nullptr;
  Backend::reduce(args);
  return sums;
}

inline Tensor bn_reduce(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved,
                        const Optional& weight, const Optional& bias, const std::string& activation,
                        double param, int64_t channel_dim, const Optional& exchange) {
  return sums_of({"bn_reduce", "x", x, z, weight, bias, activation, param, channel_dim, false}, dy, saved,
                 exchange);
}

inline Tensor abn_reduce(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& weight,
                         const Optional& bias, const std::string& activation, double param,
                         int64_t channel_dim, const Optional& exchange) {
  return sums_of({"abn_reduce", "y", y, kNoTensor, weight, bias, activation, param, channel_dim, true}, dy,
                 saved, exchange);
}

// Returns dx; dz, or none without z; and this rank's sums, empty where `sums` were given or without training.
inline std::tuple<Tensor, Optional, Tensor> gradients(const NormCall& norm, const Tensor& dy,
                                                      const Tensor& saved, const Optional& sums,
                                                      bool training) {
  const bool makes_sums = training && !sums;
  auto args = gradient_args<BackwardArgs>(norm, dy, saved);
  const int64_t numbers = 2 * norm.channels();
  if (sums) check_packed(norm.op, "sums", *sums, norm.input, numbers);
  require(!sums || training, norm.op, "sums", "are given; None expected without training");
  Tensor dx = allocate_like(norm.input), own = packed(norm.input, makes_sums ? numbers : 0);
  Optional dz;
  if (norm.z) dz = allocate_like(*norm.z);
  args.layout = layout_of(norm.channel_dim, {&norm.input, &dy, &dx, pointer(norm.z), pointer(dz)});
  args.dx = dx.data_ptr();
  args.dz = dz ? dz->data_ptr() : nullptr;
  args.sums = sums ? sums->data_ptr() : nullptr;
  args.local_sums = makes_sums ? own.data_ptr() : nullptr;
  if (!makes_sums || !Backend::backward_on_chip(args)) {
    if (makes_sums) {
      ReduceArgs reducing{args};
      reducing.layout = layout_of(norm.channel_dim, {&norm.input, &dy, pointer(norm.z)});
      reducing.sums = args.local_sums;
      Backend::reduce(reducing);
      args.sums = args.local_sums;
    }
    Backend::backward(args);
  }
  return {dx, dz, own};
}

inline std::tuple<Tensor, Tensor, Tensor> bn_backward(const Tensor& x, const Tensor& dy, const Optional& z,
                                                      const Tensor& saved, const Optional& sums,
                                                      const Optional& weight, const Optional& bias,
                                                      const std::string& activation, double param,
                                                      int64_t channel_dim, bool training) {
  auto [dx, dz, own] =
      gradients({"bn_backward", "x", x, z, weight, bias, activation, param, channel_dim, false}, dy, saved,
                sums, training);
  return {dx, dz ? *dz : allocate(x, {0}, {1}, x.scalar_type()), own};
}

inline std::tuple<Tensor, Tensor> abn_backward(const Tensor& y, const Tensor& dy, const Tensor& saved,
                                               const Optional& sums, const Optional& weight,
                                               const Optional& bias, const std::string& activation,
                                               double param, int64_t channel_dim, bool training) {
  auto [dx, dz, own] =
      gradients({"abn_backward", "y", y, kNoTensor, weight, bias, activation, param, channel_dim, true}, dy,
                saved, sums, training);
  return {dx, own};
}

}  // namespace fastvit
