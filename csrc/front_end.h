// What the front ends share: an op's arguments before and after their checks, and the allocation of results.
//
// A front end has the name and the arguments of a schema in ops.cpp: see forward.h, backward.h, layer_norm.h
// and act.h. It calls the `Backend` of its library, _C or _cuda; both take the same plain structs of
// arguments.h and compute the same results. Only outputs and O(C) buffers are allocated; no op has an
// activation-sized temporary.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "arguments.h"
#include "checks.h"
#include "sync/handle.h"

namespace fastvit {

using Optional = std::optional<Tensor>;
using Momentum = std::optional<double>;
using torch::headeronly::IntHeaderOnlyArrayRef;

inline Channels channels_of(const Optional& t) {
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

// A new packed tensor in the accumulation type: `numbers` values, or `rows` rows of them.
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

inline const Tensor* pointer(const Optional& t) {
  return t ? &*t : nullptr;
}

// The layout of the operands that are not null; the first one gives the shape.
inline Layout layout_of(int64_t channel_dim, std::initializer_list<const Tensor*> operands) {
  const Tensor& first = **operands.begin();
  const int64_t* strides[kMaxOperands];
  int count = 0;
  for (const Tensor* t : operands)
    if (t) strides[count++] = t->strides().data();
  return make_layout(int(first.dim()), first.sizes().data(), int(channel_dim), count, strides);
}

// The unchecked arguments of a normalising op; references, valid during the op's call.
struct NormCall {
  const char *op, *name;  // the op's name, and that of `input` in its schema
  const Tensor& input;    // x, or y in place
  const Optional &z, &weight, &bias;
  const std::string& activation;
  double activation_param;
  int64_t channel_dim;
  bool in_place;  // an abn_* op

  int64_t channels() const { return input.size(channel_dim); }
};

inline const Optional kNoTensor;  // the z of ops in place

struct RunningStats {
  const Optional &mean, &var, &num_batches_tracked;
  const Momentum& momentum;
  double eps;
  bool training;
};

inline std::optional<peer::Exchange> optional_exchange(const char* op, const Optional& exchange,
                                                       const Tensor& result, int64_t numbers,
                                                       peer::Kind kind) {
  if (!exchange) return std::nullopt;
  return peer::exchange_of(op, *exchange, numbers, result.scalar_type(), kind);
}

// Checks `norm`, and returns the arguments of all kernels, without the layout.
inline NormArgs checked(const NormCall& norm) {
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
inline void set_running(ForwardArgs& args, const NormCall& norm, const RunningStats& running) {
  const auto& [mean, var, batches, momentum, eps, training] = running;
  check_channels(norm.op, "running_mean", mean, norm.input, norm.channels());
  check_channels(norm.op, "running_var", var, norm.input, norm.channels());
  require(mean.has_value() == var.has_value(), norm.op, "running_mean",
          "and running_var must be given together or not at all");
  if (batches) {
    require(batches->scalar_type() == ScalarType::Long && batches->numel() == 1, norm.op,
            "num_batches_tracked", "is ", toString(batches->scalar_type()), " ", ShapeOf{*batches},
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
