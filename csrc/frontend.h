// The front end of the ops: checks arguments, computes layouts, allocates results, and calls the backend with
// plain structs. `Backend` is Cpu or Cuda; both take the same arguments and compute the same results. A local
// op is a statistics op followed by a normalising op: a backend may do both in one pass, or return false. The
// public functions have the arguments of the schemas in ops.cpp.
//
// Only outputs and O(C) buffers are allocated; no op has an activation-sized temporary.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "params.h"

namespace fastvit {

template <class Backend>
class Frontend {
  using Optional = OptionalTensor;
  using Momentum = std::optional<double>;
  using Text = std::string;
  using Two = std::tuple<Tensor, Tensor>;
  using Three = std::tuple<Tensor, Tensor, Tensor>;

 public:
  static Tensor bn_stats(const Tensor& x, int64_t channel_dim, const Optional& exchange) {
    check_input("bn_stats", "x", x, channel_dim);
    const int64_t numbers = 2 * x.size(channel_dim) + 2;
    Tensor moments = packed(x, numbers);
    const auto shared = exchange_of("bn_stats", exchange, moments, numbers, peer::kMoments);
    Backend::stats({layout_of(channel_dim, x), x.scalar_type(), x.get_device_index(), x.data_ptr(),
                    moments.data_ptr(), shared ? &*shared : nullptr});
    return moments;
  }

  static Two bn_forward(const Tensor& x, const Optional& moments, const Optional& weight, const Optional& bias, const Optional& z, const Optional& mean,
                        const Optional& var, const Optional& batches, Momentum momentum, double eps, const Text& activation,
                        double param, int64_t dim) {
    return forward({"bn_forward", "x", x, z, weight, bias, activation, param, dim, false},
                   {mean, var, batches, momentum, eps}, moments);
  }
  static Two abn_forward(const Tensor& x, const Optional& moments, const Optional& weight, const Optional& bias, const Optional& mean,
                         const Optional& var, const Optional& batches, Momentum momentum, double eps, const Text& activation,
                         double param, int64_t dim) {
    return forward({"abn_forward", "x", x, {}, weight, bias, activation, param, dim, true},
                   {mean, var, batches, momentum, eps}, moments);
  }
  static Tensor abn_forward_(const Tensor& x, const Optional& moments, const Optional& weight, const Optional& bias, const Optional& mean,
                             const Optional& var, const Optional& batches, Momentum momentum, double eps, const Text& activation,
                             double param, int64_t dim) {
    return overwrite({"abn_forward_", "x", x, {}, weight, bias, activation, param, dim, true},
                     {mean, var, batches, momentum, eps}, moments);
  }
  static Two bn_local_forward(const Tensor& x, const Optional& weight, const Optional& bias, const Optional& z, const Optional& mean,
                              const Optional& var, const Optional& batches, Momentum momentum, double eps, const Text& activation,
                              double param, int64_t dim) {
    return forward({"bn_local_forward", "x", x, z, weight, bias, activation, param, dim, false},
                   {mean, var, batches, momentum, eps}, {}, true);
  }
  static Tensor abn_local_forward_(const Tensor& x, const Optional& weight, const Optional& bias, const Optional& mean, const Optional& var,
                                   const Optional& batches, Momentum momentum, double eps, const Text& activation,
                                   double param, int64_t dim) {
    return overwrite({"abn_local_forward_", "x", x, {}, weight, bias, activation, param, dim, true},
                     {mean, var, batches, momentum, eps}, {}, true);
  }

  static Tensor bn_apply(const Tensor& x, const Tensor& saved, const Optional& weight, const Optional& bias, const Optional& z, const Text& activation,
                         double param, int64_t dim) {
    const NormParams norm{"bn_apply", "x", x, z, weight, bias, activation, param, dim, false};
    ForwardArgs args{checked(norm)};
    check_packed(norm.op, "saved", saved, x, 2 * norm.channels() + 2);
    Tensor y = allocate_like(x);
    set_operands(args, norm, y);
    args.given = saved.data_ptr();
    Backend::forward(args);
    return y;
  }

  static Tensor bn_reduce(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved, const Optional& weight, const Optional& bias,
                          const Text& activation, double param, int64_t dim, const Optional& exchange) {
    return reduce({"bn_reduce", "x", x, z, weight, bias, activation, param, dim, false}, dy, saved, exchange);
  }
  static Tensor abn_reduce(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& weight, const Optional& bias, const Text& activation,
                           double param, int64_t dim, const Optional& exchange) {
    return reduce({"abn_reduce", "y", y, {}, weight, bias, activation, param, dim, true}, dy, saved,
                  exchange);
  }

  static Two bn_backward(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved, const Optional& sums, const Optional& weight,
                         const Optional& bias, const Text& activation, double param, int64_t dim) {
    return backward({"bn_backward", "x", x, z, weight, bias, activation, param, dim, false}, dy, saved, sums);
  }
  static Tensor abn_backward(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& sums, const Optional& weight, const Optional& bias,
                             const Text& activation, double param, int64_t dim) {
    const NormParams norm{"abn_backward", "y", y, {}, weight, bias, activation, param, dim, true};
    return std::get<0>(backward(norm, dy, saved, sums));
  }
  static Three bn_local_backward(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved, const Optional& weight,
                                 const Optional& bias, const Text& activation, double param, int64_t dim) {
    return local_backward({"bn_local_backward", "x", x, z, weight, bias, activation, param, dim, false}, dy,
                          saved);
  }
  static Two abn_local_backward(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& weight, const Optional& bias,
                                const Text& activation, double param, int64_t dim) {
    const NormParams norm{"abn_local_backward", "y", y, {}, weight, bias, activation, param, dim, true};
    auto [dx, dz, sums] = local_backward(norm, dy, saved);
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

  static void set_operands(ForwardArgs& args, const NormParams& norm, const Tensor& y) {
    args.layout = norm.z ? layout_of(norm.channel_dim, norm.input, y, *norm.z)
                         : layout_of(norm.channel_dim, norm.input, y);
    args.x = norm.input.data_ptr();
    args.y = y.data_ptr();
  }

  static Two forward(const NormParams& norm, const RunningParams& running, const OptionalTensor& moments,
                     bool local = false) {
    ForwardArgs args{checked(norm)};
    Tensor y = allocate_like(norm.input);
    return {y, forward_to(y, args, norm, running, moments, local)};
  }
  static Tensor overwrite(const NormParams& norm, const RunningParams& running, const OptionalTensor& moments,
                          bool local = false) {
    ForwardArgs args{checked(norm)};
    check_may_be_overwritten(norm.op, norm.name, norm.input);
    return forward_to(norm.input, args, norm, running, moments, local);
  }

  // Returns `saved`. `local`: normalise with x's own statistics.
  static Tensor forward_to(const Tensor& y, ForwardArgs& args, const NormParams& norm,
                           const RunningParams& running, const OptionalTensor& moments, bool local) {
    const int64_t numbers = 2 * norm.channels() + 2;
    if (moments) check_packed(norm.op, "moments", *moments, norm.input, numbers);
    set_running(args, norm, running);
    require(local || moments || running.mean, norm.op, "moments",
            "is None; without running_mean and running_var it must be given");
    require(running.momentum || running.num_batches_tracked || !running.mean || !(moments || local), norm.op,
            "momentum", "is None (cumulative average), which needs num_batches_tracked");
    Tensor saved = packed(norm.input, numbers);
    set_operands(args, norm, y);
    args.moments = moments ? moments->data_ptr() : nullptr;
    args.saved = saved.data_ptr();
    if (local && Backend::local_forward(args)) return saved;
    Tensor own = local ? bn_stats(norm.input, norm.channel_dim, std::nullopt) : Tensor();
    if (local) args.moments = own.data_ptr();
    Backend::forward(args);
    return saved;
  }

  static Tensor reduce(const NormParams& norm, const Tensor& dy, const Tensor& saved,
                       const OptionalTensor& exchange) {
    ReduceArgs args = reduce_args(norm, dy, saved);
    const int64_t numbers = 2 * norm.channels();
    Tensor sums =
        packed(norm.input, exchange ? 2 : 1, numbers);
    const auto shared = exchange_of(norm.op, exchange, sums, numbers, peer::kSums);
    args.sums = sums.data_ptr();
    args.exchange = shared ? &*shared : nullptr;
    Backend::reduce(args);
    return sums;
  }

  static Two backward(const NormParams& norm, const Tensor& dy, const Tensor& saved,
                      const OptionalTensor& sums) {
    BackwardArgs args = with_saved<BackwardArgs>(norm, dy, saved);
    if (sums) check_packed(norm.op, "sums", *sums, norm.input, 2 * norm.channels());
    auto [dx, dz] = set_gradients(args, norm, dy);
    args.sums = sums ? sums->data_ptr() : nullptr;
    Backend::backward(args);
    return {dx, dz};
  }

  static Three local_backward(const NormParams& norm, const Tensor& dy, const Tensor& saved) {
    BackwardArgs args = with_saved<BackwardArgs>(norm, dy, saved);
    auto [dx, dz] = set_gradients(args, norm, dy);
    Tensor sums = packed(norm.input, 2 * norm.channels());
    args.local_sums = sums.data_ptr();
    if (!Backend::local_backward(args)) {
      ReduceArgs reducing = reduce_args(norm, dy, saved);
      reducing.sums = args.local_sums;
      Backend::reduce(reducing);
      args.sums = args.local_sums;
      Backend::backward(args);
    }
    return {dx, dz, sums};
  }

  template <class Args>
  static Args with_saved(const NormParams& norm, const Tensor& dy, const Tensor& saved) {
    Args args{checked(norm)};
    check_like(norm.op, "dy", dy, norm.input);
    check_packed(norm.op, "saved", saved, norm.input, 2 * norm.channels() + 2);
    args.input = norm.input.data_ptr();
    args.dy = dy.data_ptr();
    args.saved = saved.data_ptr();
    return args;
  }
  static ReduceArgs reduce_args(const NormParams& norm, const Tensor& dy, const Tensor& saved) {
    auto args = with_saved<ReduceArgs>(norm, dy, saved);
    args.layout = norm.z ? layout_of(norm.channel_dim, norm.input, dy, *norm.z)
                         : layout_of(norm.channel_dim, norm.input, dy);
    return args;
  }
  // Returns dx and dz; dz is empty without z.
  static Two set_gradients(BackwardArgs& args, const NormParams& norm, const Tensor& dy) {
    Tensor dx = allocate_like(norm.input);
    Tensor dz = norm.z ? allocate_like(*norm.z) : allocate(norm.input, {0}, {1}, norm.input.scalar_type());
    args.layout = norm.z ? layout_of(norm.channel_dim, norm.input, dy, dx, *norm.z, dz)
                         : layout_of(norm.channel_dim, norm.input, dy, dx);
    args.dx = dx.data_ptr();
    args.dz = norm.z ? dz.data_ptr() : nullptr;
    return {dx, dz};
  }
};

}  // namespace fastvit
