// Layer norm: the schemas of its ops, the arguments of its kernels, and its front ends; as batch_norm.h.
//
// Rows lie side by side in all operands: an x or dy that is not contiguous is copied first.
#pragma once

#include <tuple>

#include "op_call.h"
#include "op_checker.h"

namespace fastvit {

template <class Library>
void define_layer_norm(Library& m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "ScalarType? output_dtype=None) -> (Tensor y, Tensor saved)");
  m.def(
      "layer_norm_backward(Tensor x, Tensor dy, Tensor saved, Tensor? weight=None, bool parameters=True) "
      "-> (Tensor dx, Tensor sums)");
}

struct LayerNormArgs {  // of rows of `columns` values, which lie side by side in x, y, dy and dx
  int64_t rows, columns;
  ScalarType dtype;         // of x and dx
  ScalarType output_dtype;  // of y and dy
  int device;
  ChannelVector weight, bias;
  double eps;
  const void* x;
  void* y;
  void* saved;  // mean[rows], invstd[rows]
  const void* dy;
  void* dx;
  void* sums;  // [2 * columns]; null: not needed
};

namespace backend {
void layer_norm_forward(const LayerNormArgs& args);
void layer_norm_backward(const LayerNormArgs& args);
}  // namespace backend

struct LayerNormForwardCall : OpCall {
  Tensor x = take<Tensor>();
  OptTensor weight = take<OptTensor>(), bias = take<OptTensor>();
  double eps = take<double>();
  std::optional<ScalarType> output_dtype = take<std::optional<ScalarType>>();
};

struct LayerNormBackwardCall : OpCall {
  Tensor x = take<Tensor>(), dy = take<Tensor>(), saved = take<Tensor>();
  OptTensor weight = take<OptTensor>();
  bool parameters = take<bool>();
};

// Checks x, whose rows are its last dimension, and the dtype of y, which is that of `dtype_argument`.
inline LayerNormArgs check_rows(const OpChecker& check, const Tensor& x, const char* dtype_argument,
                                ScalarType output) {
  const ScalarType dtype = x.scalar_type();
  check.require(x.dim() >= 1 && x.size(x.dim() - 1) >= 1 && x.size(x.dim() - 1) <= 1 << 30, "x", "has shape ",
                PrintShape{x}, "; 1 to 2^30 values in the last dimension expected");
  const bool narrows = output == ScalarType::Half || output == ScalarType::BFloat16;
  check.require(output == dtype || (dtype == ScalarType::Float && narrows), dtype_argument, "is ",
                toString(output), "; ", toString(dtype), " expected, as x's",
                dtype == ScalarType::Float ? ", or 16 bits" : "");
  LayerNormArgs args{};
  args.columns = x.size(x.dim() - 1);
  args.rows = x.numel() / args.columns;
  args.dtype = dtype;
  args.output_dtype = output;
  args.device = x.get_device_index();
  return args;
}

inline std::tuple<Tensor, Tensor> layer_norm_forward(const LayerNormForwardCall& call) {
  const OpChecker check("layer_norm_forward", "x", call.x);
  const ScalarType output = call.output_dtype.value_or(call.x.scalar_type());
  LayerNormArgs args = check_rows(check, call.x, "output_dtype", output);
  args.weight = check.check_channel_vector("weight", call.weight, args.columns);
  args.bias = check.check_channel_vector("bias", call.bias, args.columns);
  args.eps = check.check_eps(call.eps);
  const Tensor x = torch::stable::contiguous(call.x);
  Tensor y = torch::stable::new_empty(x, x.sizes(), output), saved = check.new_packed(2 * args.rows);
  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.saved = saved.data_ptr();
  backend::layer_norm_forward(args);
  return {y, saved};
}

inline std::tuple<Tensor, Tensor> layer_norm_backward(const LayerNormBackwardCall& call) {
  const OpChecker check("layer_norm_backward", "x", call.x);
  check.check_defined("dy", call.dy);
  LayerNormArgs args = check_rows(check, call.x, "dy", call.dy.scalar_type());
  args.weight = check.check_channel_vector("weight", call.weight, args.columns);
  check.check_same_shape_as_input("dy", call.dy);
  check.check_packed("saved", call.saved, 2 * args.rows);
  const Tensor x = torch::stable::contiguous(call.x), dy = torch::stable::contiguous(call.dy);
  Tensor dx = torch::stable::new_empty(x, x.sizes()),
         sums = check.new_packed(call.parameters ? 2 * args.columns : 0);
  args.x = x.data_ptr();
  args.dy = dy.data_ptr();
  args.saved = call.saved.data_ptr();
  args.dx = dx.data_ptr();
  args.sums = call.parameters ? sums.data_ptr() : nullptr;
  backend::layer_norm_backward(args);
  return {dx, sums};
}

}  // namespace fastvit
