// The ops between torch and a backend: check, lay out, allocate, and hand plain structs to the
// backend's kernels. `Backend` is Cpu or Cuda; both get the same arguments and give the same results. A local
// op is a statistics op and the one that uses them: a backend may do both at once, or return false.
//
// Only outputs and O(C) buffers are allocated here; no op makes an activation-sized temporary.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "arguments.h"
#include "checks.h"

namespace fastvit {

using OptionalTensor = std::optional<Tensor>;

inline Channels channels_of(const OptionalTensor& t) {
  return t ? Channels{t->data_ptr(), t->scalar_type()} : Channels{};
}

inline Tensor packed(const Tensor& x, int64_t numbers) {
  return torch::stable::new_empty(x, {numbers}, accumulation_type(x.scalar_type()));
}

template <class... Tensors>
Layout layout_of(int64_t channel_dim, const Tensor& first, const Tensors&... others) {
  const Operand operands[] = {{first.strides().data()}, {others.strides().data()}...};
  return make_layout(int(first.dim()), first.sizes().data(), int(channel_dim), 1 + sizeof...(others),
                     operands);
}

template <class Backend>
struct Frontend {
  static Tensor bn_stats(Tensor x, int64_t channel_dim, OptionalTensor exchange) {
    check_input("bn_stats", "x", x, channel_dim);
    const int64_t numbers = 2 * x.size(channel_dim) + 2;
    Tensor moments = packed(x, numbers);
    const auto shared = exchange_of("bn_stats", exchange, moments, numbers, peer::kMoments);
    Backend::stats({layout_of(channel_dim, x), x.scalar_type(), x.get_device_index(), x.data_ptr(),
                    moments.data_ptr(), shared ? &*shared : nullptr});
    return moments;
  }

  static std::tuple<Tensor, Tensor> bn_forward(Tensor x, OptionalTensor moments, OptionalTensor weight,
                                               OptionalTensor bias, OptionalTensor z,
                                               OptionalTensor running_mean, OptionalTensor running_var,
                                               OptionalTensor num_batches_tracked,
                                               std::optional<double> momentum, double eps,
                                               std::string activation, double activation_param,
                                               int64_t channel_dim) {
    check_input("bn_forward", "x", x, channel_dim);
    if (z) check_like("bn_forward", "z", *z, x);
    Tensor y = torch::stable::empty_like(x);
    Tensor saved =
        forward("bn_forward", x, y, moments, false, weight, bias, z, running_mean, running_var,
                num_batches_tracked, momentum, eps, activation, activation_param, channel_dim, false);
    return {y, saved};
  }

  static Tensor bn_apply(Tensor x, Tensor saved, OptionalTensor weight, OptionalTensor bias, OptionalTensor z,
                         std::string activation, double activation_param, int64_t channel_dim) {
    check_input("bn_apply", "x", x, channel_dim);
    const int64_t C = x.size(channel_dim);
    if (z) check_like("bn_apply", "z", *z, x);
    check_packed("bn_apply", "saved", saved, x, 2 * C + 2);
    check_channels("bn_apply", "weight", weight, x, C);
    check_channels("bn_apply", "bias", bias, x, C);
    Tensor y = torch::stable::empty_like(x);
    ForwardArgs args{};
    args.layout = z ? layout_of(channel_dim, x, y, *z) : layout_of(channel_dim, x, y);
    args.dtype = x.scalar_type();
    args.device = x.get_device_index();
    args.x = x.data_ptr();
    args.y = y.data_ptr();
    args.z = z ? z->data_ptr() : nullptr;
    args.given = saved.data_ptr();
    args.weight = channels_of(weight);
    args.bias = channels_of(bias);
    args.activation = parse_activation("bn_apply", activation, activation_param, false);
    args.activation_param = activation_param;
    Backend::forward(args);
    return y;
  }

  static Tensor abn_forward_(Tensor x, OptionalTensor moments, OptionalTensor weight, OptionalTensor bias,
                             OptionalTensor running_mean, OptionalTensor running_var,
                             OptionalTensor num_batches_tracked, std::optional<double> momentum, double eps,
                             std::string activation, double activation_param, int64_t channel_dim) {
    check_input("abn_forward_", "x", x, channel_dim);
    check_may_be_overwritten("abn_forward_", "x", x);
    return forward("abn_forward_", x, x, moments, false, weight, bias, std::nullopt, running_mean,
                   running_var, num_batches_tracked, momentum, eps, activation, activation_param, channel_dim,
                   true);
  }

  static std::tuple<Tensor, Tensor> abn_forward(Tensor x, OptionalTensor moments, OptionalTensor weight,
                                                OptionalTensor bias, OptionalTensor running_mean,
                                                OptionalTensor running_var,
                                                OptionalTensor num_batches_tracked,
                                                std::optional<double> momentum, double eps,
                                                std::string activation, double activation_param,
                                                int64_t channel_dim) {
    check_input("abn_forward", "x", x, channel_dim);
    Tensor y = torch::stable::empty_like(x);
    Tensor saved =
        forward("abn_forward", x, y, moments, false, weight, bias, std::nullopt, running_mean, running_var,
                num_batches_tracked, momentum, eps, activation, activation_param, channel_dim, true);
    return {y, saved};
  }

  static Tensor bn_reduce(Tensor x, Tensor dy, OptionalTensor z, Tensor saved, OptionalTensor weight,
                          OptionalTensor bias, std::string activation, double activation_param,
                          int64_t channel_dim, OptionalTensor exchange) {
    return reduce("bn_reduce", "x", x, dy, z, saved, weight, bias, activation, activation_param, channel_dim,
                  false, exchange);
  }

  static Tensor abn_reduce(Tensor y, Tensor dy, Tensor saved, OptionalTensor weight, OptionalTensor bias,
                           std::string activation, double activation_param, int64_t channel_dim,
                           OptionalTensor exchange) {
    return reduce("abn_reduce", "y", y, dy, std::nullopt, saved, weight, bias, activation, activation_param,
                  channel_dim, true, exchange);
  }

  static std::tuple<Tensor, Tensor> bn_backward(Tensor x, Tensor dy, OptionalTensor z, Tensor saved,
                                                OptionalTensor sums, OptionalTensor weight,
                                                OptionalTensor bias, std::string activation,
                                                double activation_param, int64_t channel_dim) {
    return backward("bn_backward", "x", x, dy, z, saved, sums, weight, bias, activation, activation_param,
                    channel_dim, false);
  }

  static Tensor abn_backward(Tensor y, Tensor dy, Tensor saved, OptionalTensor sums, OptionalTensor weight,
                             OptionalTensor bias, std::string activation, double activation_param,
                             int64_t channel_dim) {
    return std::get<0>(backward("abn_backward", "y", y, dy, std::nullopt, saved, sums, weight, bias,
                                activation, activation_param, channel_dim, true));
  }

  static std::tuple<Tensor, Tensor> bn_local_forward(
      Tensor x, OptionalTensor weight, OptionalTensor bias, OptionalTensor z, OptionalTensor running_mean,
      OptionalTensor running_var, OptionalTensor num_batches_tracked, std::optional<double> momentum,
      double eps, std::string activation, double activation_param, int64_t channel_dim) {
    check_input("bn_local_forward", "x", x, channel_dim);
    if (z) check_like("bn_local_forward", "z", *z, x);
    Tensor y = torch::stable::empty_like(x);
    Tensor saved =
        forward("bn_local_forward", x, y, std::nullopt, true, weight, bias, z, running_mean, running_var,
                num_batches_tracked, momentum, eps, activation, activation_param, channel_dim, false);
    return {y, saved};
  }

  static Tensor abn_local_forward_(Tensor x, OptionalTensor weight, OptionalTensor bias,
                                   OptionalTensor running_mean, OptionalTensor running_var,
                                   OptionalTensor num_batches_tracked, std::optional<double> momentum,
                                   double eps, std::string activation, double activation_param,
                                   int64_t channel_dim) {
    check_input("abn_local_forward_", "x", x, channel_dim);
    check_may_be_overwritten("abn_local_forward_", "x", x);
    return forward("abn_local_forward_", x, x, std::nullopt, true, weight, bias, std::nullopt, running_mean,
                   running_var, num_batches_tracked, momentum, eps, activation, activation_param, channel_dim,
                   true);
  }

  static std::tuple<Tensor, Tensor, Tensor> bn_local_backward(Tensor x, Tensor dy, OptionalTensor z,
                                                              Tensor saved, OptionalTensor weight,
                                                              OptionalTensor bias, std::string activation,
                                                              double activation_param, int64_t channel_dim) {
    return local_backward("bn_local_backward", "x", x, dy, z, saved, weight, bias, activation,
                          activation_param, channel_dim, false);
  }

  static std::tuple<Tensor, Tensor> abn_local_backward(Tensor y, Tensor dy, Tensor saved,
                                                       OptionalTensor weight, OptionalTensor bias,
                                                       std::string activation, double activation_param,
                                                       int64_t channel_dim) {
    auto [dx, dz, sums] = local_backward("abn_local_backward", "y", y, dy, std::nullopt, saved, weight, bias,
                                         activation, activation_param, channel_dim, true);
    return {dx, sums};
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("bn_stats", TORCH_BOX(&bn_stats));
    m.impl("bn_forward", TORCH_BOX(&bn_forward));
    m.impl("bn_apply", TORCH_BOX(&bn_apply));
    m.impl("abn_forward_", TORCH_BOX(&abn_forward_));
    m.impl("abn_forward", TORCH_BOX(&abn_forward));
    m.impl("bn_reduce", TORCH_BOX(&bn_reduce));
    m.impl("abn_reduce", TORCH_BOX(&abn_reduce));
    m.impl("bn_backward", TORCH_BOX(&bn_backward));
    m.impl("abn_backward", TORCH_BOX(&abn_backward));
    m.impl("bn_local_forward", TORCH_BOX(&bn_local_forward));
    m.impl("abn_local_forward_", TORCH_BOX(&abn_local_forward_));
    m.impl("bn_local_backward", TORCH_BOX(&bn_local_backward));
    m.impl("abn_local_backward", TORCH_BOX(&abn_local_backward));
  }

 private:
  static std::optional<peer::Exchange> exchange_of(const char* op, const OptionalTensor& exchange,
                                                   const Tensor& result, int64_t numbers, peer::Kind kind) {
    if (!exchange) return std::nullopt;
    return peer::exchange_of(op, *exchange, numbers, result.scalar_type(), kind);
  }

  static Tensor forward(const char* op, const Tensor& x, const Tensor& y, const OptionalTensor& moments,
                        bool local, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& z, const OptionalTensor& running_mean,
                        const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
                        std::optional<double> momentum, double eps, const std::string& activation,
                        double activation_param, int64_t channel_dim, bool in_place) {
    const int64_t C = x.size(channel_dim);
    const Activation act = parse_activation(op, activation, activation_param, in_place);
    if (moments) check_packed(op, "moments", *moments, x, 2 * C + 2);
    check_channels(op, "weight", weight, x, C);
    check_channels(op, "bias", bias, x, C);
    check_channels(op, "running_mean", running_mean, x, C);
    check_channels(op, "running_var", running_var, x, C);
    require(running_mean.has_value() == running_var.has_value(), op, "running_mean",
            "and running_var must be given together or not at all");
    require(local || moments.has_value() || running_mean.has_value(), op, "moments",
            "is None; without running_mean and running_var it must be given");
    if (num_batches_tracked) {
      require(num_batches_tracked->scalar_type() == ScalarType::Long && num_batches_tracked->numel() == 1, op,
              "num_batches_tracked", "is ", toString(num_batches_tracked->scalar_type()), " ",
              shape_of(*num_batches_tracked), "; one int64 number expected");
      check_device(op, "num_batches_tracked", *num_batches_tracked, x);
      check_memory(op, "num_batches_tracked", *num_batches_tracked);
    }
    require(momentum || num_batches_tracked || !running_mean || !(moments || local), op, "momentum",
            "is None (cumulative average), which needs num_batches_tracked");
    Tensor saved = packed(x, 2 * C + 2);
    ForwardArgs args{};
    args.layout = z ? layout_of(channel_dim, x, y, *z) : layout_of(channel_dim, x, y);
    args.dtype = x.scalar_type();
    args.device = x.get_device_index();
    args.x = x.data_ptr();
    args.y = y.data_ptr();
    args.z = z ? z->data_ptr() : nullptr;
    args.moments = moments ? moments->data_ptr() : nullptr;
    args.weight = channels_of(weight);
    args.bias = channels_of(bias);
    args.running_mean = channels_of(running_mean);
    args.running_var = channels_of(running_var);
    args.num_batches_tracked =
        num_batches_tracked ? static_cast<int64_t*>(num_batches_tracked->data_ptr()) : nullptr;
    args.cumulative = !momentum;
    args.momentum = momentum.value_or(0);
    args.eps = eps;
    args.in_place = in_place;
    args.activation = act;
    args.activation_param = activation_param;
    args.saved = saved.data_ptr();
    if (local && Backend::local_forward(args)) return saved;
    Tensor own = local ? bn_stats(x, channel_dim, std::nullopt) : Tensor();
    if (local) args.moments = own.data_ptr();
    Backend::forward(args);
    return saved;
  }

  static Tensor reduce(const char* op, const char* name, const Tensor& input, const Tensor& dy,
                       const OptionalTensor& z, const Tensor& saved, const OptionalTensor& weight,
                       const OptionalTensor& bias, const std::string& activation, double activation_param,
                       int64_t channel_dim, bool in_place, const OptionalTensor& exchange) {
    const Activation act = check_backward(op, name, input, dy, z, saved, weight, bias, activation,
                                          activation_param, channel_dim, in_place);
    const int64_t numbers = 2 * input.size(channel_dim);
    Tensor sums =
        torch::stable::new_empty(input, {exchange ? 2 : 1, numbers}, accumulation_type(input.scalar_type()));
    const auto shared = exchange_of(op, exchange, sums, numbers, peer::kSums);
    ReduceArgs args =
        reduce_args(input, dy, z, saved, weight, bias, act, activation_param, channel_dim, in_place, sums);
    args.exchange = shared ? &*shared : nullptr;
    Backend::reduce(args);
    return sums;
  }

  static std::tuple<Tensor, Tensor> backward(const char* op, const char* name, const Tensor& input,
                                             const Tensor& dy, const OptionalTensor& z, const Tensor& saved,
                                             const OptionalTensor& sums, const OptionalTensor& weight,
                                             const OptionalTensor& bias, const std::string& activation,
                                             double activation_param, int64_t channel_dim, bool in_place) {
    const Activation act = check_backward(op, name, input, dy, z, saved, weight, bias, activation,
                                          activation_param, channel_dim, in_place);
    if (sums) check_packed(op, "sums", *sums, input, 2 * input.size(channel_dim));
    Tensor dx = torch::stable::empty_like(input);
    Tensor dz = z ? torch::stable::empty_like(*z) : torch::stable::new_empty(input, {0});
    BackwardArgs args = backward_args(input, dy, dx, z, dz, saved, weight, bias, act, activation_param,
                                      channel_dim, in_place);
    args.sums = sums ? sums->data_ptr() : nullptr;
    Backend::backward(args);
    return {dx, dz};
  }

  static std::tuple<Tensor, Tensor, Tensor> local_backward(
      const char* op, const char* name, const Tensor& input, const Tensor& dy, const OptionalTensor& z,
      const Tensor& saved, const OptionalTensor& weight, const OptionalTensor& bias,
      const std::string& activation, double activation_param, int64_t channel_dim, bool in_place) {
    const Activation act = check_backward(op, name, input, dy, z, saved, weight, bias, activation,
                                          activation_param, channel_dim, in_place);
    Tensor dx = torch::stable::empty_like(input);
    Tensor dz = z ? torch::stable::empty_like(*z) : torch::stable::new_empty(input, {0});
    Tensor sums = packed(input, 2 * input.size(channel_dim));
    BackwardArgs args = backward_args(input, dy, dx, z, dz, saved, weight, bias, act, activation_param,
                                      channel_dim, in_place);
    args.local_sums = sums.data_ptr();
    if (!Backend::local_backward(args)) {
      Backend::reduce(
          reduce_args(input, dy, z, saved, weight, bias, act, activation_param, channel_dim, in_place, sums));
      args.sums = sums.data_ptr();
      Backend::backward(args);
    }
    return {dx, dz, sums};
  }

  static ReduceArgs reduce_args(const Tensor& input, const Tensor& dy, const OptionalTensor& z,
                                const Tensor& saved, const OptionalTensor& weight, const OptionalTensor& bias,
                                Activation activation, double activation_param, int64_t channel_dim,
                                bool in_place, const Tensor& sums) {
    ReduceArgs args{};
    args.layout = z ? layout_of(channel_dim, input, dy, *z) : layout_of(channel_dim, input, dy);
    args.dtype = input.scalar_type();
    args.device = input.get_device_index();
    args.in_place = in_place;
    args.input = input.data_ptr();
    args.dy = dy.data_ptr();
    args.z = z ? z->data_ptr() : nullptr;
    args.saved = saved.data_ptr();
    args.weight = channels_of(weight);
    args.bias = channels_of(bias);
    args.activation = activation;
    args.activation_param = activation_param;
    args.sums = sums.data_ptr();
    return args;
  }

  static BackwardArgs backward_args(const Tensor& input, const Tensor& dy, const Tensor& dx,
                                    const OptionalTensor& z, const Tensor& dz, const Tensor& saved,
                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                    Activation activation, double activation_param, int64_t channel_dim,
                                    bool in_place) {
    BackwardArgs args{};
    args.layout = z ? layout_of(channel_dim, input, dy, dx, *z, dz) : layout_of(channel_dim, input, dy, dx);
    args.dtype = input.scalar_type();
    args.device = input.get_device_index();
    args.in_place = in_place;
    args.input = input.data_ptr();
    args.dy = dy.data_ptr();
    args.dx = dx.data_ptr();
    args.z = z ? z->data_ptr() : nullptr;
    args.dz = z ? dz.data_ptr() : nullptr;
    args.saved = saved.data_ptr();
    args.weight = channels_of(weight);
    args.bias = channels_of(bias);
    args.activation = activation;
    args.activation_param = activation_param;
    return args;
  }

  static Activation check_backward(const char* op, const char* name, const Tensor& input, const Tensor& dy,
                                   const OptionalTensor& z, const Tensor& saved, const OptionalTensor& weight,
                                   const OptionalTensor& bias, const std::string& activation,
                                   double activation_param, int64_t channel_dim, bool in_place) {
    check_input(op, name, input, channel_dim);
    const int64_t C = input.size(channel_dim);
    check_like(op, "dy", dy, input);
    if (z) check_like(op, "z", *z, input);
    check_packed(op, "saved", saved, input, 2 * C + 2);
    check_channels(op, "weight", weight, input, C);
    check_channels(op, "bias", bias, input, C);
    return parse_activation(op, activation, activation_param, in_place);
  }
};

}  // namespace fastvit
