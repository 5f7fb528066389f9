// OpChecker: checks the arguments of an op. allocate, allocate_like, allocate_empty: make an op's results.
//
// The message of an error names the op and the argument, and says what the argument is and what is expected.
// Most methods of OpChecker check one argument and return it in the form that kernels take (a pointer, a
// ChannelVector, an enumerator), so that a caller cannot forget the check.
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

// Throws an error unless `condition` is true. The message is "op: argument parts...".
template <class... Parts>
void require(bool condition, const char* op, const char* argument, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  message << op << ": " << argument << " ";
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// Parts of a message that become text only if a check fails.
struct PrintShape {
  const Tensor& tensor;
};
struct PrintDevice {
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& out, const PrintShape& shape) {
  out << "(";
  for (int64_t d = 0; d < shape.tensor.dim(); ++d) out << (d ? ", " : "") << shape.tensor.size(d);
  return out << ")";
}

inline std::ostream& operator<<(std::ostream& out, const PrintDevice& device) {
  return device.tensor.is_cpu() ? out << "cpu" : out << "cuda:" << int(device.tensor.get_device_index());
}

// Checks that a tensor is on the device of the op's input.
inline void check_device(const char* op, const char* argument, const Tensor& tensor, const Tensor& input) {
  require(tensor.device() == input.device(), op, argument, "is on ", PrintDevice{tensor}, "; ",
          PrintDevice{input}, " expected, where the other tensors are");
}

// The limit of a tensor's numel(), which counts the elements of an expanded tensor too. It keeps products
// with numel(), such as a number of bytes, within int64.
constexpr int64_t kMaxElements = int64_t(1) << 48;

// Checks that the storage of a tensor holds all of its elements. FSDP, for example, frees the storage of a
// parameter and leaves its shape. Every tensor is checked before its memory is used.
inline void check_storage_size(const char* op, const char* argument, const Tensor& tensor) {
  const int64_t dims = tensor.dim(), *sizes = tensor.sizes().data(), *strides = tensor.strides().data();
  int64_t elements = 1;
  bool is_empty = false, is_within_limit = true;
  for (int64_t d = 0; d < dims; ++d) {
    is_empty = is_empty || sizes[d] == 0;
    const int64_t size = std::max<int64_t>(sizes[d], 1);
    is_within_limit = is_within_limit && size <= kMaxElements / elements;
    if (is_within_limit) elements *= size;
  }
  require(is_within_limit, op, argument, "has shape ", PrintShape{tensor},
          "; at most 2^48 elements expected");
  if (is_empty) return;
  int64_t bytes = 0;
  require(aoti_torch_get_storage_size(tensor.get(), &bytes) == 0, op, argument,
          "has no storage; a tensor that has its memory expected");
  // The number of elements in the storage after the tensor's first element. From this number the loop
  // subtracts, for each dimension, the distance between the dimension's first and last element. A negative
  // number means that the storage is too small.
  int64_t elements_left = bytes / int64_t(tensor.element_size()) - tensor.storage_offset() - 1;
  for (int64_t d = 0; d < dims && elements_left >= 0; ++d) {
    const int64_t steps = sizes[d] - 1;
    if (steps > 0)
      elements_left = strides[d] > elements_left / steps ? -1 : elements_left - steps * strides[d];
  }
  require(elements_left >= 0, op, argument, "has shape ", PrintShape{tensor},
          ", but its storage was freed or shrunk to ", bytes,
          " bytes; a tensor that has its memory expected");
}

// Returns a new tensor on x's device. It is made by torch's C interface, because torch::stable's functions
// look up an operator by its name in each call, which takes longer than the allocation.
inline Tensor allocate(const Tensor& x, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides,
                       ScalarType dtype) {
  using torch::stable::detail::from, torch::stable::detail::to;
  const int32_t dtype_number = to<int32_t>(from(dtype));
  int32_t device_type = 0, device_index = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                                  dtype_number, device_type, device_index, &handle));
  return Tensor(handle);
}

class OpChecker {
 protected:
  const char *op, *input_name;
  const Tensor& input;

 public:
  // input: the op's first tensor, with which the others are compared. input_name: the name of that argument.
  OpChecker(const char* op, const char* input_name, const Tensor& input)
      : op(op), input_name(input_name), input(input) {
    check_defined(input_name, input);
    check_floating(input_name, input);
    check_storage_size(op, input_name, input);
  }

  template <class... Parts>
  void require(bool condition, const char* argument, const Parts&... parts) const {
    fastvit::require(condition, op, argument, parts...);
  }

  // A caller may pass None for a tensor that the schema requires.
  void check_defined(const char* argument, const Tensor& tensor) const {
    require(tensor.defined(), argument, "is None; a tensor expected");
  }

  void check_floating(const char* argument, const Tensor& tensor) const {
    const ScalarType dtype = tensor.scalar_type();
    require(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
                dtype == ScalarType::BFloat16,
            argument, "has dtype ", toString(dtype), "; float16, bfloat16, float32 or float64 expected");
  }

  // Checks that the input has 2 to kMaxDims dimensions, as (N, C, H, W) has, and that channel_dim is one of
  // them. Returns the number of channels.
  int64_t check_channel_dim(int64_t channel_dim) const {
    require(input.dim() >= 2 && input.dim() <= kMaxDims, input_name, "has shape ", PrintShape{input},
            "; 2 to ", kMaxDims, " dimensions expected");
    require(channel_dim >= 0 && channel_dim < input.dim(), "channel_dim", "is ", channel_dim, "; 0 to ",
            input.dim() - 1, " expected for shape ", PrintShape{input});
    return input.size(channel_dim);
  }

  // Checks that the input is not expanded, so that an op may overwrite it.
  void check_writable() const {
    for (int64_t d = 0; d < input.dim(); ++d)
      require(input.size(d) <= 1 || input.stride(d) != 0, input_name,
              "is expanded (stride 0): several elements share one memory location, so it cannot be "
              "overwritten; a tensor that owns its memory expected");
  }

  // Checks that a tensor of any dtype has the input's shape and device.
  void check_same_shape_as_input(const char* argument, const Tensor& tensor) const {
    bool is_same = tensor.dim() == input.dim();
    for (int64_t d = 0; is_same && d < input.dim(); ++d) is_same = tensor.size(d) == input.size(d);
    require(is_same, argument, "has shape ", PrintShape{tensor}, "; ", PrintShape{input}, " expected");
    check_device(op, argument, tensor, input);
    check_storage_size(op, argument, tensor);
  }
  // Checks that a tensor has the input's shape, dtype and device.
  const void* check_same_as_input(const char* argument, const Tensor& tensor) const {
    check_defined(argument, tensor);
    require(tensor.scalar_type() == input.scalar_type(), argument, "has dtype ",
            toString(tensor.scalar_type()), "; ", toString(input.scalar_type()), " expected, as the input's");
    check_same_shape_as_input(argument, tensor);
    return tensor.data_ptr();
  }
  const void* check_same_as_input(const char* argument, const OptTensor& tensor) const {
    return tensor ? check_same_as_input(argument, *tensor) : nullptr;
  }

  // Checks a parameter or a buffer, if there is one: contiguous, with `numbers` numbers of any floating-point
  // dtype.
  ChannelVector check_channel_vector(const char* argument, const OptTensor& tensor, int64_t numbers) const {
    if (!tensor) return {};
    check_floating(argument, *tensor);
    require(tensor->dim() == 1 && tensor->size(0) == numbers, argument, "has shape ", PrintShape{*tensor},
            "; (", numbers, ",) expected, one number per channel or column");
    require(tensor->is_contiguous(), argument, "is not contiguous; a contiguous tensor expected");
    check_device(op, argument, *tensor, input);
    check_storage_size(op, argument, *tensor);
    return {tensor->data_ptr(), tensor->scalar_type()};
  }

  // Checks a contiguous tensor of `numbers` numbers, such as moments or sums. It has the accumulation type:
  // double if the input is double, else float.
  const void* check_accumulation_tensor(const char* argument, const Tensor& tensor, int64_t numbers) const {
    check_defined(argument, tensor);
    const ScalarType expected = accumulation_type(input.scalar_type());
    require(tensor.scalar_type() == expected, argument, "has dtype ", toString(tensor.scalar_type()), "; ",
            toString(expected), " expected for input of dtype ", toString(input.scalar_type()));
    require(tensor.dim() == 1 && tensor.size(0) == numbers, argument, "has shape ", PrintShape{tensor}, "; (",
            numbers, ",) expected");
    require(tensor.is_contiguous(), argument, "is not contiguous; a contiguous tensor expected");
    check_device(op, argument, tensor, input);
    check_storage_size(op, argument, tensor);
    return tensor.data_ptr();
  }
  const void* check_accumulation_tensor(const char* argument, const OptTensor& tensor,
                                        int64_t numbers) const {
    return tensor ? check_accumulation_tensor(argument, *tensor, numbers) : nullptr;
  }

  // Checks a tensor of one int64 number, if there is one.
  int64_t* check_counter(const char* argument, const OptTensor& tensor) const {
    if (!tensor) return nullptr;
    require(tensor->scalar_type() == ScalarType::Long && tensor->numel() == 1, argument, "is ",
            toString(tensor->scalar_type()), " ", PrintShape{*tensor}, "; one int64 number expected");
    check_device(op, argument, *tensor, input);
    check_storage_size(op, argument, *tensor);
    return static_cast<int64_t*>(tensor->data_ptr());
  }

  // CUDA kernels for float32 and 16 bits add eps to a variance in float32. 2^126 is the largest power of two
  // whose reciprocal is a normal number of float32 too.
  double check_eps(double eps) const {
    require(eps >= 0 && eps <= 0x1p126, "eps", "is ", eps, "; a number from 0 to 2**126 expected");
    return eps;
  }

  // Returns the activation of a name. needs_inverse: backward recovers x from y, so the activation with its
  // parameter must be invertible.
  Activation check_activation(const std::string& name, double param, bool needs_inverse) const {
    const auto position = std::find(std::begin(kActivationNames), std::end(kActivationNames), name);
    if (position == std::end(kActivationNames)) {
      std::string all_names;
      for (const char* valid_name : kActivationNames)
        all_names += (all_names.empty() ? "" : ", ") + std::string(valid_name);
      require(false, "activation", "is '", name, "'; one of ", all_names, " expected");
    }
    const auto activation = Activation(position - std::begin(kActivationNames));
    require(!needs_inverse || is_invertible(activation), "activation", "is ", name,
            ", which cannot be inverted; in place it is identity, leaky_relu or elu");
    // The inverse divides by the parameter. From 2^-126 to 2^126 it and its reciprocal are normal in float32.
    require(!needs_inverse || activation == Activation::identity || (param >= 0x1p-126 && param <= 0x1p126),
            "activation_param", "is ", param, "; > 0 expected for ", name,
            " in place, which is inverted, within float32");
    return activation;
  }

  // Returns a new tensor of the accumulation type, such as moments or sums.
  Tensor new_accumulation_tensor(int64_t numbers) const {
    return allocate(input, {numbers}, {1}, accumulation_type(input.scalar_type()));
  }
  Tensor new_accumulation_tensor(int64_t rows, int64_t numbers) const {
    return allocate(input, {rows, numbers}, {numbers, 1}, accumulation_type(input.scalar_type()));
  }
};

// Returns an empty tensor, in the place of a result that a call does not have.
inline Tensor allocate_empty(const Tensor& x) {
  return allocate(x, {0}, {1}, x.scalar_type());
}

// Returns a new tensor with x's shape and dtype, and with the strides that torch.empty_like would choose.
inline Tensor allocate_like(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  // The dimensions are found in the order of their strides, the fastest first. Those found so far cover
  // `dense_elements` elements without a gap.
  int64_t dense_elements = 1;
  for (size_t d = 0; d < sizes.size();) {
    const bool is_next_slower = sizes[d] > 1 && strides[d] == dense_elements;
    if (is_next_slower) dense_elements *= sizes[d];
    d = is_next_slower ? 0 : d + 1;
  }
  if (dense_elements == x.numel()) return allocate(x, sizes, strides, x.scalar_type());
  return torch::stable::empty_like(x);  // x has gaps or overlaps, or is empty
}

// Returns the order in which an op visits the elements of its operands, which all have the same shape. Null
// pointers, which come last, are left out.
inline WalkLayout make_walk_layout(int64_t channel_dim, std::initializer_list<const Tensor*> operands) {
  const Tensor& first_operand = **operands.begin();
  const int64_t* strides[kMaxOperands];
  int count = 0;
  for (const Tensor* operand : operands)
    if (operand) strides[count++] = operand->strides().data();
  return make_walk_layout(int(first_operand.dim()), first_operand.sizes().data(), int(channel_dim), count,
                          strides);
}

inline const Tensor* pointer_or_null(const OptTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

}  // namespace fastvit
