// Argument checks of the ops. Every message has the op, the argument, its value and the valid values.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "activation_functions.h"
#include "dtypes.h"
#include "layout.h"

namespace fastvit {

using torch::stable::Tensor;

template <class... Parts>
void require(bool ok, const char* op, const char* argument, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  message << op << ": " << argument << " ";
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// Parts of a message, which become text only if the check fails.
struct ShapeOf {
  const Tensor& t;
};
struct DeviceOf {
  const Tensor& t;
};

inline std::ostream& operator<<(std::ostream& out, const ShapeOf& shape) {
  out << "(";
  for (int64_t d = 0; d < shape.t.dim(); ++d) out << (d ? ", " : "") << shape.t.size(d);
  return out << ")";
}

inline std::ostream& operator<<(std::ostream& out, const DeviceOf& device) {
  return device.t.is_cpu() ? out << "cpu" : out << "cuda:" << int(device.t.get_device_index());
}

inline void check_device(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  require(t.device() == like.device(), op, argument, "is on ", DeviceOf{t}, "; ", DeviceOf{like},
          " expected, where the other tensors are");
}

// The largest number of elements of a tensor, expanded or not. Products with it (bytes, slices) fit in int64.
constexpr int64_t kMaxElements = int64_t(1) << 48;

// Called for every tensor before it is read: its storage may have been freed or shrunk (FSDP does that to
// parameters), and its shape does not show it.
inline void check_memory(const char* op, const char* argument, const Tensor& t) {
  const int64_t dims = t.dim(), *sizes = t.sizes().data(), *strides = t.strides().data();
  int64_t elements = 1;
  bool empty = false, counted = true;
  for (int64_t d = 0; d < dims; ++d) {
    empty = empty || sizes[d] == 0;
    const int64_t n = std::max<int64_t>(sizes[d], 1);
    counted = counted && n <= kMaxElements / elements;
    if (counted) elements *= n;
  }
  require(counted, op, argument, "has shape ", ShapeOf{t}, "; at most 2^48 elements expected");
  if (empty) return;
  int64_t bytes = 0;
  require(aoti_torch_get_storage_size(t.get(), &bytes) == 0, op, argument, "has no storage");
  int64_t left = bytes / int64_t(t.element_size()) - t.storage_offset() - 1;  // after the first element
  for (int64_t d = 0; d < dims && left >= 0; ++d) {
    const int64_t steps = sizes[d] - 1;
    if (steps > 0) left = strides[d] > left / steps ? -1 : left - steps * strides[d];
  }
  require(left >= 0, op, argument, "has shape ", ShapeOf{t}, ", but its storage was freed or shrunk to ",
          bytes, " bytes; a tensor that has its memory expected");
}

inline void check_floating(const char* op, const char* argument, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  require(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
              dtype == ScalarType::BFloat16,
          op, argument, "has dtype ", toString(dtype), "; float16, bfloat16, float32 or float64 expected");
}

inline void check_input(const char* op, const char* argument, const Tensor& x, int64_t channel_dim) {
  check_floating(op, argument, x);
  require(x.dim() >= 2 && x.dim() <= kMaxDims, op, argument, "has shape ", ShapeOf{x}, "; 2 to ", kMaxDims,
          " dimensions expected");
  require(channel_dim >= 0 && channel_dim < x.dim(), op, "channel_dim", "is ", channel_dim, "; 0 to ",
          x.dim() - 1, " expected for shape ", ShapeOf{x});
  check_memory(op, argument, x);
}

inline void check_may_be_overwritten(const char* op, const char* argument, const Tensor& x) {
  for (int64_t d = 0; d < x.dim(); ++d)
    require(x.size(d) <= 1 || x.stride(d) != 0, op, argument,
            "is expanded (stride 0): several elements share one memory location, so it cannot be "
            "overwritten; a tensor that owns its memory expected");
}

// Check another activation `t`: check_shape requires x's shape and device, check_like also its dtype.
inline void check_shape(const char* op, const char* argument, const Tensor& t, const Tensor& x) {
  bool same = t.dim() == x.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = t.size(d) == x.size(d);
  require(same, op, argument, "has shape ", ShapeOf{t}, "; ", ShapeOf{x}, " expected");
  check_device(op, argument, t, x);
  check_memory(op, argument, t);
}
inline void check_like(const char* op, const char* argument, const Tensor& t, const Tensor& x) {
  require(t.scalar_type() == x.scalar_type(), op, argument, "has dtype ", toString(t.scalar_type()), "; ",
          toString(x.scalar_type()), " expected, as the input's");
  check_shape(op, argument, t, x);
}

// `t` is a parameter or a buffer: C numbers of any floating-point type, contiguous.
inline void check_channels(const char* op, const char* argument, const std::optional<Tensor>& t,
                           const Tensor& x, int64_t channels) {
  if (!t) return;
  check_floating(op, argument, *t);
  require(t->dim() == 1 && t->size(0) == channels, op, argument, "has shape ", ShapeOf{*t}, "; (", channels,
          ",) expected, one number per channel");
  require(t->is_contiguous(), op, argument, "is not contiguous");
  check_device(op, argument, *t, x);
  check_memory(op, argument, *t);
}

// `t` is a packed tensor of `width` numbers in the accumulation type, contiguous.
inline void check_packed(const char* op, const char* argument, const Tensor& t, const Tensor& x,
                         int64_t width) {
  const ScalarType expected = accumulation_type(x.scalar_type());
  require(t.scalar_type() == expected, op, argument, "has dtype ", toString(t.scalar_type()), "; ",
          toString(expected), " expected for input of dtype ", toString(x.scalar_type()));
  require(t.dim() == 1 && t.size(0) == width, op, argument, "has shape ", ShapeOf{t}, "; (", width,
          ",) expected");
  require(t.is_contiguous(), op, argument, "is not contiguous");
  check_device(op, argument, t, x);
  check_memory(op, argument, t);
}

inline Activation parse_activation(const char* op, const std::string& name, double param, bool in_place) {
  std::string all;
  int at = 0;
  for (const char* known : kActivationNames) {
    const Activation activation = Activation(at++);
    if (name == known) {
      require(!in_place || is_invertible(activation), op, "activation", "is ", name,
              ", which cannot be inverted; in place it is identity, leaky_relu or elu");
      require(!in_place || activation == Activation::identity || (param >= 0x1p-126 && param <= 0x1p126), op,
              "activation_param", "is ", param, "; > 0 expected for ", name,
              " in place, which is inverted, within float32");
      return activation;
    }
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  require(false, op, "activation", "is '", name, "'; one of ", all, " expected");
  return Activation::identity;
}

}  // namespace fastvit
