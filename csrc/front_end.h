// What the ops' front ends share: parameters, the checks that make a backend's arguments of them, allocation.
//
// A front end has the arguments of the schemas in ops.cpp, and is named as the kernels that it calls:
// stats.h, forward.h, reduce.h, backward.h, layer_norm.h, act.h. `Backend` is Cpu or Cuda; both take the same
// plain structs of arguments.h and compute the same results. Only outputs and O(C) buffers are allocated; no
// op has an activation-sized temporary.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "checks.h"
#include "sync/handle.h"

namespace fastvit {

using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::IntHeaderOnlyArrayRef;

inline Channels channels_of(const OptionalTensor& t) {
  return t ? Channels{t->data_ptr(), t->scalar_type()} : Channels{};
}

// A new tensor on x's device. torch::stable's functions look an operator up by its name in every call, which
// takes longer than the allocation.
inline Tensor allocate(const Tensor& x, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides,
                       ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  int32_t type = 0, index = 0;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                  to<int32_t>(from(dtype)), type, index, &made));
  return Tensor(made);
}

// Numbers in the accumulation type, in one dimension, or in rows.
inline Tensor packed(const Tensor& x, int64_t numbers) {
  return allocate(x, {numbers}, {1}, accumulation_type(x.scalar_type()));
}
inline Tensor packed(const Tensor& x, int64_t rows, int64_t numbers) {
  return allocate(x, {rows, numbers}, {numbers, 1}, accumulation_type(x.scalar_type()));
}

// A new tensor with x's shape, dtype and strides, as torch.empty_like.
inline Tensor allocate_like(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t run = 1;  // elements that lie side by side, along the dimensions found so far
  for (size_t d = 0; d < sizes.size();) {
    const bool continues = sizes[d] > 1 && strides[d] == run;
    if (continues) run *= sizes[d];
    d = continues ? 0 : d + 1;
  }
  if (run == x.numel()) return allocate(x, sizes, strides, x.scalar_type());
  return torch::stable::empty_like(x);  // with gaps or overlaps, or empty
}

template <class... Tensors>
Layout layout_of(int64_t channel_dim, const Tensor& first, const Tensors&... others) {
  const Operand operands[] = {{first.strides().data()}, {others.strides().data()}...};
  return make_layout(int(first.dim()), first.sizes().data(), int(channel_dim), 1 + sizeof...(others),
                     operands);
}

// The unchecked arguments of a normalising op; references, valid during the op's call.
struct NormParams {
  const char *op, *name;  // the op's name, and that of `input` in its schema
  const Tensor& input;    // x, or y in place
  const OptionalTensor &z, &weight, &bias;
  const std::string& activation;
  double activation_param;
  int64_t channel_dim;
  bool in_place;

  int64_t channels() const { return input.size(channel_dim); }
};

inline NormParams bn_params(const char* op, const Tensor& x, const OptionalTensor& z,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const std::string& activation, double param, int64_t channel_dim) {
  return {.op = op,
          .name = "x",
          .input = x,
          .z = z,
          .weight = weight,
          .bias = bias,
          .activation = activation,
          .activation_param = param,
          .channel_dim = channel_dim,
          .in_place = false};
}

// Of an op in place, or of its inverse.
inline NormParams abn_params(const char* op, const char* name, const Tensor& input,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             const std::string& activation, double param, int64_t channel_dim) {
  static const OptionalTensor no_residual;
  NormParams norm = bn_params(op, input, no_residual, weight, bias, activation, param, channel_dim);
  norm.name = name;
  norm.in_place = true;
  return norm;
}

struct RunningParams {
  const OptionalTensor &mean, &var, &num_batches_tracked;
  const std::optional<double>& momentum;
  double eps;
  bool training;
};

inline std::optional<peer::Exchange> exchange_of(const char* op, const OptionalTensor& exchange,
                                                 const Tensor& result, int64_t numbers, peer::Kind kind) {
  if (!exchange) return std::nullopt;
  return peer::exchange_of(op, *exchange, numbers, result.scalar_type(), kind);
}

// Checks `norm`, and returns the arguments of all kernels, without the layout.
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

// Checks `running`, and adds it to the arguments of a forward op.
inline void set_running(ForwardArgs& args, const NormParams& norm, const RunningParams& running) {
  const auto& [mean, var, batches, momentum, eps, training] = running;
  check_channels(norm.op, "running_mean", mean, norm.input, norm.channels());
  check_channels(norm.op, "running_var", var, norm.input, norm.channels());
  require(mean.has_value() == var.has_value(), norm.op, "running_mean",
          "and running_var must be given together or not at all");
  if (batches) {
    require(batches->scalar_type() == ScalarType::Long && batches->numel() == 1, norm.op,
            "num_batches_tracked", "is ", toString(batches->scalar_type()), " ", shape_of(*batches),
            "; one int64 number expected");
    check_device(norm.op, "num_batches_tracked", *batches, norm.input);
    check_memory(norm.op, "num_batches_tracked", *batches);
    args.num_batches_tracked = static_cast<int64_t*>(batches->data_ptr());
  }
  args.running_mean = channels_of(mean);
  args.running_var = channels_of(var);
  args.cumulative = !momentum;
  args.momentum = momentum.value_or(0);
  args.eps = eps;
}

}  // namespace fastvit
