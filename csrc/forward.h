// The front end of bn_forward, abn_forward_, abn_forward and bn_apply; see front_end.h.
//
// Without moments a training forward makes x's own. A backend may do that in the same pass, or return false.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "front_end.h"
#include "stats.h"

namespace fastvit {

template <class Backend>
class ForwardOps {
  using Optional = OptionalTensor;
  using Momentum = std::optional<double>;
  using Text = std::string;
  using Two = std::tuple<Tensor, Tensor>;

 public:
  static Two bn_forward(const Tensor& x, const Optional& moments, const Optional& weight,
                        const Optional& bias, const Optional& z, const Optional& mean, const Optional& var,
                        const Optional& batches, const Momentum& momentum, double eps, const Text& activation,
                        double param, int64_t channel_dim, bool training) {
    const NormParams norm = bn_params("bn_forward", x, z, weight, bias, activation, param, channel_dim);
    return make(norm, moments, {mean, var, batches, momentum, eps, training});
  }
  static Two abn_forward(const Tensor& x, const Optional& moments, const Optional& weight,
                         const Optional& bias, const Optional& mean, const Optional& var,
                         const Optional& batches, const Momentum& momentum, double eps,
                         const Text& activation, double param, int64_t channel_dim, bool training) {
    return make(abn_params("abn_forward", "x", x, weight, bias, activation, param, channel_dim), moments,
                {mean, var, batches, momentum, eps, training});
  }
  static Tensor abn_forward_(const Tensor& x, const Optional& moments, const Optional& weight,
                             const Optional& bias, const Optional& mean, const Optional& var,
                             const Optional& batches, const Momentum& momentum, double eps,
                             const Text& activation, double param, int64_t channel_dim, bool training) {
    const NormParams norm = abn_params("abn_forward_", "x", x, weight, bias, activation, param, channel_dim);
    ForwardArgs args{checked(norm)};
    check_may_be_overwritten(norm.op, norm.name, x);
    return run(x, args, norm, moments, {mean, var, batches, momentum, eps, training});
  }

  static Tensor bn_apply(const Tensor& x, const Tensor& saved, const Optional& weight, const Optional& bias,
                         const Optional& z, const Text& activation, double param, int64_t channel_dim) {
    const NormParams norm = bn_params("bn_apply", x, z, weight, bias, activation, param, channel_dim);
    ForwardArgs args{checked(norm)};
    check_packed(norm.op, "saved", saved, x, 2 * norm.channels() + 2);
    Tensor y = allocate_like(x);
    set_operands(args, norm, y);
    args.applied = saved.data_ptr();
    Backend::forward(args);
    return y;
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("bn_forward", TORCH_BOX(&bn_forward));
    m.impl("abn_forward", TORCH_BOX(&abn_forward));
    m.impl("abn_forward_", TORCH_BOX(&abn_forward_));
    m.impl("bn_apply", TORCH_BOX(&bn_apply));
  }

 private:
  static void set_operands(ForwardArgs& args, const NormParams& norm, const Tensor& y) {
    args.layout = norm.z ? layout_of(norm.channel_dim, norm.input, y, *norm.z)
                         : layout_of(norm.channel_dim, norm.input, y);
    args.x = norm.input.data_ptr();
    args.y = y.data_ptr();
  }

  static Two make(const NormParams& norm, const Optional& moments, const RunningParams& running) {
    ForwardArgs args{checked(norm)};
    Tensor y = allocate_like(norm.input);
    return {y, run(y, args, norm, moments, running)};
  }

  // Writes y and the running statistics; returns `saved`.
  static Tensor run(const Tensor& y, ForwardArgs& args, const NormParams& norm, const Optional& moments,
                    const RunningParams& running) {
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
      if (Backend::local_forward(args)) return saved;
      used = packed(norm.input, numbers);
      StatsOps<Backend>::run(norm.input, norm.channel_dim, *used, nullptr);
    }
    args.moments = used ? used->data_ptr() : nullptr;
    Backend::forward(args);
    return saved;
  }
};

}  // namespace fastvit
