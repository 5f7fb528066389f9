// The front end of layer_norm_forward and layer_norm_backward; see front_end.h.
//
// Rows lie side by side in all operands: an x or dy that is not contiguous is copied first.
#pragma once

#include <tuple>

#include "front_end.h"

namespace fastvit {

// `named` is the argument that `output`, the dtype of y and dy, comes from.
inline LayerNormArgs checked_rows(const char* op, const Tensor& x, const Optional& weight, const char* named,
                                  ScalarType output) {
  const ScalarType dtype = x.scalar_type();
  check_floating(op, "x", x);
  require(x.dim() >= 1 && x.size(x.dim() - 1) >= 1 && x.size(x.dim() - 1) <= 1 << 30, op, "x", "has shape ",
          ShapeOf{x}, "; 1 to 2^30 values in the last dimension expected");
  check_memory(op, "x", x);
  const bool narrows = output == ScalarType::Half || output == ScalarType::BFloat16;
  require(output == dtype || (dtype == ScalarType::Float && narrows), op, named, "is ", toString(output),
          "; ", toString(dtype), " expected, as x's", dtype == ScalarType::Float ? ", or 16 bits" : "");
  LayerNormArgs args{};
  args.columns = x.size(x.dim() - 1);
  args.rows = x.numel() / args.columns;
  args.dtype = dtype;
  args.output_dtype = output;
  args.device = x.get_device_index();
  check_channels(op, "weight", weight, x, args.columns);
  args.weight = channels_of(weight);
  return args;
}

inline std::tuple<Tensor, Tensor> layer_norm_forward(Tensor x, Optional weight, Optional bias, double eps,
                                                     std::optional<ScalarType> output_dtype) {
  constexpr const char* op = "layer_norm_forward";
  const ScalarType output = output_dtype.value_or(x.scalar_type());
  LayerNormForwardArgs args{checked_rows(op, x, weight, "output_dtype", output)};
  check_channels(op, "bias", bias, x, args.columns);
  args.bias = channels_of(bias);
  args.eps = eps;
  const Tensor rows = torch::stable::contiguous(x);
  Tensor y = torch::stable::new_empty(x, x.sizes(), output), saved = packed(x, 2 * args.rows);
  args.x = rows.data_ptr();
  args.y = y.data_ptr();
  args.saved = saved.data_ptr();
  Backend::layer_norm_forward(args);
  return {y, saved};
}

inline std::tuple<Tensor, Tensor> layer_norm_backward(Tensor x, Tensor dy, Tensor saved, Optional weight,
                                                      bool parameters) {
  constexpr const char* op = "layer_norm_backward";
  LayerNormBackwardArgs args{checked_rows(op, x, weight, "dy", dy.scalar_type())};
  check_shape(op, "dy", dy, x);
  check_packed(op, "saved", saved, x, 2 * args.rows);
  const Tensor rows = torch::stable::contiguous(x), gradients = torch::stable::contiguous(dy);
  Tensor dx = torch::stable::new_empty(x, x.sizes()), sums = packed(x, parameters ? 2 * args.columns : 0);
  args.x = rows.data_ptr();
  args.dy = gradients.data_ptr();
  args.saved = saved.data_ptr();
  args.dx = dx.data_ptr();
  args.sums = parameters ? sums.data_ptr() : nullptr;
  Backend::layer_norm_backward(args);
  return {dx, sums};
}

}  // namespace fastvit
