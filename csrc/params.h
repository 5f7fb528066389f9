// What the front end of an op is given, and the arguments that all kernels have in common made of it.
#pragma once

#include <torch/csrc/stable/ops.h>

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

// What every normalising op is given, unchecked; for use within the op's call.
struct NormParams {
  const char *op, *name;  // of the op, and of `input` in its schema
  const Tensor& input;    // x, or y in place
  const OptionalTensor &z, &weight, &bias;
  const std::string& activation;
  double activation_param;
  int64_t channel_dim;
  bool in_place;

  int64_t channels() const { return input.size(channel_dim); }
};

struct RunningParams {
  const OptionalTensor &mean, &var, &num_batches_tracked;
  std::optional<double> momentum;
  double eps;
};

// Checks `norm`, and makes of it what all kernels are given; but for the layout.
inline NormArgs checked(const NormParams& norm) {
  const auto& [op, name, input, z, weight, bias, activation, activation_param, channel_dim, in_place] = norm;
  check_input(op, name, input, channel_dim);
  if (z) check_like(op, "z", *z, input);
  check_channels(op, "weight", weight, input, norm.channels());
  check_channels(op, "bias", bias, input, norm.channels());
  NormArgs args{};
  args.dtype = input.scalar_type();
  args.device = input.get_device_index();
  args.in_place = in_place;
  args.z = z ? z->data_ptr() : nullptr;
  args.weight = channels_of(weight);
  args.bias = channels_of(bias);
  args.activation = parse_activation(op, activation, activation_param, in_place);
  args.activation_param = activation_param;
  return args;
}

}  // namespace fastvit
