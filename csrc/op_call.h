// OpCall: reads the arguments of a call of an op; call_op: calls the C++ function of an op.
//
// torch calls a boxed function with a stack, on which the arguments lie in the order of the op's schema. The
// function overwrites them by its results. A struct of an op's arguments derives from OpCall, and has one
// member per argument, in the order of the schema:
//
//     // "scale(Tensor x, float factor=1.0) -> Tensor"
//     struct ScaleCall : OpCall {
//       Tensor x = take<Tensor>();
//       double factor = take<double>();
//     };
//     Tensor scale(const ScaleCall& call);
//     m.impl("scale", call_op<scale>);
//
// C++ initializes the members in the order of their declarations. Only the tests check that this is the order
// of the schema: they call each op with each argument.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

namespace fastvit {

using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

class OpCall {
  StableIValue *next, *end;

 public:
  OpCall(StableIValue* stack, uint64_t num_arguments) : next(stack), end(stack + num_arguments) {}

  // Returns the next argument, which the caller then owns.
  template <class T>
  T take() {
    if (next == end) throw std::runtime_error("fastvit: an op's schema has too few arguments");
    return torch::stable::detail::to<T>(*next++);
  }
  void check_all_taken() const {
    if (next != end) throw std::runtime_error("fastvit: an op's schema has too many arguments");
  }
};

// In torch up to 2.13, to<std::string> leaks a copy of the string, so the string is read and deleted here.
template <>
inline std::string OpCall::take<std::string>() {
  const auto handle = take<StringHandle>();
  const char* characters = nullptr;
  size_t length = 0;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &characters));
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  std::string result(characters, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return result;
}

inline void check_number_of_results(uint64_t expected, uint64_t actual) {
  if (expected != actual) throw std::runtime_error("fastvit: an op's schema has another number of results");
}
template <class... Results>
void write_results(StableIValue* stack, uint64_t num_results, const std::tuple<Results...>& results) {
  check_number_of_results(num_results, sizeof...(Results));
  std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); },
             results);
}
inline void write_results(StableIValue* stack, uint64_t num_results, const Tensor& result) {
  check_number_of_results(num_results, 1);
  *stack = torch::stable::detail::from(result);
}

// The struct of arguments that the function of an op takes.
template <class Function>
struct ArgumentsOf;
template <class Call, class Results>
struct ArgumentsOf<Results (*)(const Call&)> {
  using Type = Call;
};

// The boxed function of an op, which a library registers. kFunction: the function that takes a struct of
// arguments and returns a Tensor or a tuple of Tensors.
template <auto kFunction>
void call_op(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  const typename ArgumentsOf<decltype(kFunction)>::Type call{OpCall(stack, num_arguments)};
  call.check_all_taken();
  write_results(stack, num_results, kFunction(call));
}

}  // namespace fastvit
