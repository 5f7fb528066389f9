// Layer norm of the last dimension: the schemas of its ops (fastvit/ops.py documents them), the arguments of
// its kernels, and a function per op, which checks a call, allocates its results and hands both to a backend.
//
// The functions are compiled twice: into _C.so with the backend csrc/cpu, and into _cuda.so with csrc/cuda.
// x is a matrix of rows of `columns` values. An x or dy that is not contiguous is copied first.
#pragma once

#include <tuple>

#include "op_call.h"
#include "op_checker.h"

namespace fastvit {

// `parameters`: whether the gradients of weight and bias are needed.
template <class Library>
void define_layer_norm(Library& m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "ScalarType? output_dtype=None) -> (Tensor y, Tensor saved)");
  m.def(
      "layer_norm_backward(Tensor x, Tensor dy, Tensor saved, Tensor? weight=None, bool parameters=True) "
      "-> (Tensor dx, Tensor sums)");
}

// The arguments of the kernels. x, y, dy and dx are contiguous, [rows][columns]. A forward does not use dy,
// dx or sums; a backward does not use bias, eps or y.
struct LayerNormArgs {
  int64_t rows, columns;
  ScalarType dtype;         // of x and dx
  ScalarType output_dtype;  // of y and dy
  int device;
  ChannelVector weight, bias;
  double eps;
  const void* x;
  void* y;
  void* saved;  // mean[rows], invstd[rows]; a backward only reads them
  const void* dy;
  void* dx;
  // For each column the sum of dy, the gradient of bias; then for each column the sum of dy * xhat, the
  // gradient of weight. xhat is the normalized x. Null if these gradients are not needed.
  void* sums;
};

namespace backend {
void layer_norm_forward(const LayerNormArgs& args);
void layer_norm_backward(const LayerNormArgs& args);
}  // namespace backend

// The structs below read the arguments of a call in the order of the schema (op_call.h).
struct LayerNormForwardCall : OpCall {
  Tensor x = take<Tensor>();
  OptTensor weight = take<OptTensor>(), bias = take<OptTensor>();
  double eps = take<double>();
  std::optional<ScalarType> output_dtype = take<std::optional<ScalarType>>();
};

struct LayerNormBackwardCall : OpCall {
  Tensor x = take<Tensor>(), dy = take<Tensor>(), saved = take<Tensor>();
  OptTensor weight = take<OptTensor>();
  bool needs_parameter_gradients = take<bool>();
};

// Checks the shape of x and output_dtype. Returns the kernel's arguments, of which rows, columns, dtypes and
// device are set.
// output_dtype: the dtype of y in a forward, of dy in a backward. dtype_argument: the argument of the call
// that gives it, for the message.
inline LayerNormArgs check_rows(const OpChecker& checker, const Tensor& x, const char* dtype_argument,
                                ScalarType output_dtype) {
  const ScalarType dtype = x.scalar_type();
  checker.require(x.dim() >= 1 && x.size(x.dim() - 1) >= 1 && x.size(x.dim() - 1) <= 1 << 30, "x",
                  "has shape ", PrintShape{x}, "; 1 to 2^30 values in the last dimension expected");
  const bool has_16_bits = output_dtype == ScalarType::Half || output_dtype == ScalarType::BFloat16;
  checker.require(output_dtype == dtype || (dtype == ScalarType::Float && has_16_bits), dtype_argument, "is ",
                  toString(output_dtype), "; ", toString(dtype), " expected, as x's",
                  dtype == ScalarType::Float ? ", or 16 bits" : "");
  LayerNormArgs args{};
  args.columns = x.size(x.dim() - 1);
  args.rows = x.numel() / args.columns;
  args.dtype = dtype;
  args.output_dtype = output_dtype;
  args.device = x.get_device_index();
  return args;
}

inline std::tuple<Tensor, Tensor> layer_norm_forward(const LayerNormForwardCall& call) {
  const OpChecker checker("layer_norm_forward", "x", call.x);
  const ScalarType output_dtype = call.output_dtype.value_or(call.x.scalar_type());
  LayerNormArgs args = check_rows(checker, call.x, "output_dtype", output_dtype);
  args.weight = checker.check_channel_vector("weight", call.weight, args.columns);
  args.bias = checker.check_channel_vector("bias", call.bias, args.columns);
  args.eps = checker.check_eps(call.eps);
  const Tensor x = torch::stable::contiguous(call.x);
  Tensor y = torch::stable::new_empty(x, x.sizes(), output_dtype),
         saved = checker.new_accumulation_tensor(2 * args.rows);
  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.saved = saved.data_ptr();
  backend::layer_norm_forward(args);
  return {y, saved};
}

inline std::tuple<Tensor, Tensor> layer_norm_backward(const LayerNormBackwardCall& call) {
  const OpChecker checker("layer_norm_backward", "x", call.x);
  checker.check_defined("dy", call.dy);
  LayerNormArgs args = check_rows(checker, call.x, "dy", call.dy.scalar_type());
  args.weight = checker.check_channel_vector("weight", call.weight, args.columns);
  checker.check_same_shape_as_input("dy", call.dy);
  checker.check_accumulation_tensor("saved", call.saved, 2 * args.rows);
  const Tensor x = torch::stable::contiguous(call.x), dy = torch::stable::contiguous(call.dy);
  Tensor dx = torch::stable::new_empty(x, x.sizes()),
         sums = checker.new_accumulation_tensor(call.needs_parameter_gradients ? 2 * args.columns : 0);
  args.x = x.data_ptr();
  args.dy = dy.data_ptr();
  args.saved = call.saved.data_ptr();
  args.dx = dx.data_ptr();
  args.sums = call.needs_parameter_gradients ? sums.data_ptr() : nullptr;
  backend::layer_norm_backward(args);
  return {dx, sums};
}

}  // namespace fastvit
