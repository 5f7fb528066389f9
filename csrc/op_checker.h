// Checks of an op's arguments, and the allocation of its results.
//
// Every message has the op, the argument, what it is and what is expected. A method of OpChecker checks one
// argument and returns what kernels take, so that nothing unchecked reaches them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "activation_functions.h"
#include "dtypes.h"
#include "op_call.h"
#include "walk_layout.h"

namespace fastvit {

using torch::headeronly::IntHeaderOnlyArrayRef;

template <class... Parts>
void require(bool ok, const char* op, const char* argument, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  message << op << ": " << argument << " ";
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// Parts of a message, which become text only if the check fails.
struct PrintShape {
  const Tensor& t;
};
struct PrintDevice {
  const Tensor& t;
};

inline std::ostream& operator<<(std::ostream& out, const PrintShape& shape) {
  out << "(";
  for (int64_t d = 0; d < shape.t.dim(); ++d) out << (d ? ", " : "") << shape.t.size(d);
  return out << ")";
}

inline std::ostream& operator<<(std::ostream& out, const PrintDevice& device) {
  return device.t.is_cpu() ? out << "cpu" : out << "cuda:" << int(device.t.get_device_index());
}

inline void check_device(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  require(t.device() == like.device(), op, argument, "is on ", PrintDevice{t}, "; ", PrintDevice{like},
          " expected, where the other tensors are");
}

// The largest number of elements of a tensor, expanded or not. Products with it (bytes, slices) fit in int64.
constexpr int64_t kMaxElements = int64_t(1) << 48;

// Called for every tensor before it is read: its storage may have been freed or shrunk (FSDP does that to
// parameters), and its shape does not show it.
inline void check_storage(const char* op, const char* argument, const Tensor& t) {
  const int64_t dims = t.dim(), *sizes = t.sizes().data(), *strides = t.strides().data();
  int64_t elements = 1;
  bool empty = false, counted = true;
  for (int64_t d = 0; d < dims; ++d) {
    empty = empty || sizes[d] == 0;
    const int64_t n = std::max<int64_t>(sizes[d], 1);
    counted = counted && n <= kMaxElements / elements;
    if (counted) elements *= n;
  }
  require(counted, op, argument, "has shape ", PrintShape{t}, "; at most 2^48 elements expected");
  if (empty) return;
  int64_t bytes = 0;
  require(aoti_torch_get_storage_size(t.get(), &bytes) == 0, op, argument,
          "has no storage; a tensor that has its memory expected");
  int64_t left = bytes / int64_t(t.element_size()) - t.storage_offset() - 1;  // after the first element
  for (int64_t d = 0; d < dims && left >= 0; ++d) {
    const int64_t steps = sizes[d] - 1;
    if (steps > 0) left = strides[d] > left / steps ? -1 : left - steps * strides[d];
  }
  require(left >= 0, op, argument, "has shape ", PrintShape{t}, ", but its storage was freed or shrunk to ",
          bytes, " bytes; a tensor that has its memory expected");
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

class OpChecker {
 protected:
  const char *op, *name;
  const Tensor& input;

 public:
  // `input`, the argument `name`, is the op's first tensor, which the others are compared with.
  OpChecker(const char* op, const char* name, const Tensor& input) : op(op), name(name), input(input) {
    check_defined(name, input);
    check_floating(name, input);
    check_storage(op, name, input);
  }

  template <class... Parts>
  void require(bool ok, const char* argument, const Parts&... parts) const {
    fastvit::require(ok, op, argument, parts...);
  }

  // A caller may pass None for a tensor that the schema requires.
  void check_defined(const char* argument, const Tensor& t) const {
    require(t.defined(), argument, "is None; a tensor expected");
  }

  void check_floating(const char* argument, const Tensor& t) const {
    const ScalarType dtype = t.scalar_type();
    require(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                dtype == ScalarType::BFloat16,
            argument, "has dtype ", toString(dtype), "; float16, bfloat16, float32 or float64 expected");
  }

  // The channels of an activation (N, C, *).
  int64_t check_channel_dim(int64_t channel_dim) const {
    require(input.dim() >= 2 && input.dim() <= kMaxDims, name, "has shape ", PrintShape{input}, "; 2 to ",
            kMaxDims, " dimensions expected");
    require(channel_dim >= 0 && channel_dim < input.dim(), "channel_dim", "is ", channel_dim, "; 0 to ",
            input.dim() - 1, " expected for shape ", PrintShape{input});
    return input.size(channel_dim);
  }

  void check_writable() const {
    for (int64_t d = 0; d < input.dim(); ++d)
      require(input.size(d) <= 1 || input.stride(d) != 0, name,
              "is expanded (stride 0): several elements share one memory location, so it cannot be "
              "overwritten; a tensor that owns its memory expected");
  }

  // A tensor of the input's shape, on its device, of any dtype.
  void check_same_shape_as_input(const char* argument, const Tensor& t) const {
    bool same = t.dim() == input.dim();
    for (int64_t d = 0; same && d < input.dim(); ++d) same = t.size(d) == input.size(d);
    require(same, argument, "has shape ", PrintShape{t}, "; ", PrintShape{input}, " expected");
    check_device(op, argument, t, input);
    check_storage(op, argument, t);
  }
  // A tensor of the input's shape and dtype, on its device.
  const void* check_same_as_input(const char* argument, const Tensor& t) const {
    check_defined(argument, t);
    require(t.scalar_type() == input.scalar_type(), argument, "has dtype ", toString(t.scalar_type()), "; ",
            toString(input.scalar_type()), " expected, as the input's");
    check_same_shape_as_input(argument, t);
    return t.data_ptr();
  }
  const void* check_same_as_input(const char* argument, const OptTensor& t) const {
    return t ? check_same_as_input(argument, *t) : nullptr;
  }

  // A parameter or a buffer: `numbers` of any floating-point dtype, contiguous; or none.
  ChannelVector check_channel_vector(const char* argument, const OptTensor& t, int64_t numbers) const {
    if (!t) return {};
    check_floating(argument, *t);
    require(t->dim() == 1 && t->size(0) == numbers, argument, "has shape ", PrintShape{*t}, "; (", numbers,
            ",) expected, one number per channel or column");
    require(t->is_contiguous(), argument, "is not contiguous; a contiguous tensor expected");
    check_device(op, argument, *t, input);
    check_storage(op, argument, *t);
    return {t->data_ptr(), t->scalar_type()};
  }

  // `numbers` in the accumulation type, contiguous.
  const void* check_packed(const char* argument, const Tensor& t, int64_t numbers) const {
    check_defined(argument, t);
    const ScalarType expected = accumulation_type(input.scalar_type());
    require(t.scalar_type() == expected, argument, "has dtype ", toString(t.scalar_type()), "; ",
            toString(expected), " expected for input of dtype ", toString(input.scalar_type()));
    require(t.dim() == 1 && t.size(0) == numbers, argument, "has shape ", PrintShape{t}, "; (", numbers,
            ",) expected");
    require(t.is_contiguous(), argument, "is not contiguous; a contiguous tensor expected");
    check_device(op, argument, t, input);
    check_storage(op, argument, t);
    return t.data_ptr();
  }
  const void* check_packed(const char* argument, const OptTensor& t, int64_t numbers) const {
    return t ? check_packed(argument, *t, numbers) : nullptr;
  }

  int64_t* check_counter(const char* argument, const OptTensor& t) const {
    if (!t) return nullptr;
    require(t->scalar_type() == ScalarType::Long && t->numel() == 1, argument, "is ",
            toString(t->scalar_type()), " ", PrintShape{*t}, "; one int64 number expected");
    check_device(op, argument, *t, input);
    check_storage(op, argument, *t);
    return static_cast<int64_t*>(t->data_ptr());
  }

  double check_eps(double eps) const {
    require(eps >= 0 && eps <= 0x1p126, "eps", "is ", eps, "; a number from 0 to 2**126 expected");
    return eps;
  }

  // The activation of a name. With `invertible` its output can be inverted.
  Activation check_activation(const std::string& activation, double param, bool invertible) const {
    const auto known = std::find(std::begin(kActivationNames), std::end(kActivationNames), activation);
    if (known == std::end(kActivationNames)) {
      std::string all;
      for (const char* each : kActivationNames) all += (all.empty() ? "" : ", ") + std::string(each);
      require(false, "activation", "is '", activation, "'; one of ", all, " expected");
    }
    const auto found = Activation(known - std::begin(kActivationNames));
    require(!invertible || is_invertible(found), "activation", "is ", activation,
            ", which cannot be inverted; in place it is identity, leaky_relu or elu");
    require(!invertible || found == Activation::identity || (param >= 0x1p-126 && param <= 0x1p126),
            "activation_param", "is ", param, "; > 0 expected for ", activation,
            " in place, which is inverted, within float32");
    return found;
  }

  // A new packed tensor in the accumulation type: `numbers` values, or `rows` rows of them.
  Tensor new_packed(int64_t numbers) const {
    return allocate(input, {numbers}, {1}, accumulation_type(input.scalar_type()));
  }
  Tensor new_packed(int64_t rows, int64_t numbers) const {
    return allocate(input, {rows, numbers}, {numbers, 1}, accumulation_type(input.scalar_type()));
  }
};

// No result, in the place of one.
inline Tensor allocate_empty(const Tensor& x) {
  return allocate(x, {0}, {1}, x.scalar_type());
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

// The layout of the operands that are not null; the first one gives the shape.
inline WalkLayout walk_layout_of(int64_t channel_dim, std::initializer_list<const Tensor*> operands) {
  const Tensor& first = **operands.begin();
  const int64_t* strides[kMaxOperands];
  int count = 0;
  for (const Tensor* t : operands)
    if (t) strides[count++] = t->strides().data();
  return make_walk_layout(int(first.dim()), first.sizes().data(), int(channel_dim), count, strides);
}
inline const Tensor* or_null(const OptTensor& t) {
  return t ? &*t : nullptr;
}

}  // namespace fastvit
