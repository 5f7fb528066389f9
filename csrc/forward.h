// The front ends of bn_stats, bn_forward, abn_forward_, abn_forward and bn_apply; see front_end.h.
//
// Without moments a training forward makes x's own. A backend may do that in the same pass, or return false.
#pragma once

#include <tuple>

#include "front_end.h"

namespace fastvit {

// Writes the moments of a checked x.
inline void write_moments(const Tensor& x, int64_t channel_dim, const Tensor& moments,
                          const peer::Exchange* exchange) {
  Backend::stats({.layout = layout_of(channel_dim, {&x}),
                  .dtype = x.scalar_type(),
                  .device = x.get_device_index(),
                  .x = x.data_ptr(),
                  .moments = moments.data_ptr(),
                  .exchange = exchange});
}

inline Tensor bn_stats(const Tensor& x, int64_t channel_dim, const Optional& exchange) {
  check_input("bn_stats", "x", x, channel_dim);
  const int64_t numbers = 2 * x.size(channel_dim) + 2;
  Tensor moments = packed(x, numbers);
  const auto peers = optional_exchange("bn_stats", exchange, moments, numbers, peer::kMoments);
  write_moments(x, channel_dim, moments, peers ? &*peers : nullptr);
  return moments;
}

inline void set_operands(ForwardArgs& args, const NormCall& norm, const Tensor& y) {
  args.layout = layout_of(norm.channel_dim, {&norm.input, &y, pointer(norm.z)});
  args.x = norm.input.data_ptr();
  args.y = y.data_ptr();
}

// Writes y and the running statistics; returns `saved`.
inline Tensor normalise(const Tensor& y, ForwardArgs& args, const NormCall& norm, const Optional& moments,
                        const RunningStats& running) {
  const int64_t numbers = 2 * norm.channels() + 2;
  if (moments) check_packed(norm.op, "moments", *moments, norm.input, numbers);
  set_running(args, norm, running);
  if (!running.training) {
    require(!moments, norm.op, "moments", "are given; None expected without training");
    require(running.mean.has_value(), norm.op, "running_mean",
            "is None; without training, running_mean and running_var expected");
  } else {
    require(running.momentum || running.num_batches_tracked || !running.mean, norm.op, "momentum",
            "is None (cumulative average), which needs num_batches_tracked");
  }
  Tensor saved = packed(norm.input, numbers);
  set_operands(args, norm, y);
  args.saved = saved.data_ptr();
  Optional used = moments;
  if (running.training && !moments) {
    if (Backend::forward_on_chip(args)) return saved;
    used = packed(norm.input, numbers);
    write_moments(norm.input, norm.channel_dim, *used, nullptr);
  }
  args.moments = used ? used->data_ptr() : nullptr;
  Backend::forward(args);
  return saved;
}

inline std::tuple<Tensor, Tensor> normalised(const NormCall& norm, const Optional& moments,
                                             const RunningStats& running) {
  ForwardArgs args{checked(norm)};
  Tensor y = allocate_like(norm.input);
  return {y, normalise(y, args, norm, moments, running)};
}

inline std::tuple<Tensor, Tensor> bn_forward(const Tensor& x, const Optional& moments, const Optional& weight,
                                             const Optional& bias, const Optional& z, const Optional& mean,
                                             const Optional& var, const Optional& batches,
                                             const Momentum& momentum, double eps,
                                             const std::string& activation, double param, int64_t channel_dim,
                                             bool training) {
  return normalised({"bn_forward", "x", x, z, weight, bias, activation, param, channel_dim, false}, moments,
                    {mean, var, batches, momentum, eps, training});
}

inline std::tuple<Tensor, Tensor> abn_forward(const Tensor& x, const Optional& moments,
                                              const Optional& weight, const Optional& bias,
                                              const Optional& mean, const Optional& var,
                                              const Optional& batches, const Momentum& momentum, double eps,
                                              const std::string& activation, double param,
                                              int64_t channel_dim, bool training) {
  return normalised({"abn_forward", "x", x, kNoTensor, weight, bias, activation, param, channel_dim, true},
                    moments, {mean, var, batches, momentum, eps, training});
}

inline Tensor abn_forward_(const Tensor& x, const Optional& moments, const Optional& weight,
                           const Optional& bias, const Optional& mean, const Optional& var,
                           const Optional& batches, const Momentum& momentum, double eps,
                           const std::string& activation, double param, int64_t channel_dim, bool training) {
  const NormCall norm{"abn_forward_", "x", x, kNoTensor, weight, bias, activation, param, channel_dim, true};
  ForwardArgs args{checked(norm)};
  check_may_be_overwritten(norm.op, norm.name, x);
  return normalise(x, args, norm, moments, {mean, var, batches, momentum, eps, training});
}

inline Tensor bn_apply(const Tensor& x, const Tensor& saved, const Optional& weight, const Optional& bias,
                       const Optional& z, const std::string& activation, double param, int64_t channel_dim) {
  const NormCall norm{"bn_apply", "x", x, z, weight, bias, activation, param, channel_dim, false};
  ForwardArgs args{checked(norm)};
  check_packed(norm.op, "saved", saved, x, 2 * norm.channels() + 2);
  Tensor y = allocate_like(x);
  set_operands(args, norm, y);
  args.applied = saved.data_ptr();
  Backend::forward(args);
  return y;
}

}  // namespace fastvit
