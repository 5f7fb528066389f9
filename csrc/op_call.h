// The call of an op, by torch's calling convention for boxed functions: a stack of arguments in the order of
// the schema, which results overwrite.
//
// A struct of an op's arguments derives from OpCall and has one member per argument, in the schema's order:
//
//     struct ScaleCall : OpCall {  // "scale(Tensor x, float factor=1.0) -> Tensor"
//       Tensor x = take<Tensor>();
//       double factor = take<double>();
//     };
//     Tensor scale(const ScaleCall& call);
//     m.impl("scale", call_op<scale>);
//
// C++ initialises members in the order of their declaration. That this is the schema's order is checked by
// nobody but the tests, which call each op with each argument.
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
  OpCall(StableIValue* stack, uint64_t arguments) : next(stack), end(stack + arguments) {}

  // The next argument, which the caller then owns.
  template <class T>
  T take() {
    if (next == end) throw std::runtime_error("fastvit: an op's schema has too few arguments");
    return torch::stable::detail::to<T>(*next++);
  }
  void check_end() const {
    if (next != end) throw std::runtime_error("fastvit: an op's schema has too many arguments");
  }
};

// torch's own conversion, up to 2.13, makes a copy that it does not free.
template <>
inline std::string OpCall::take<std::string>() {
  const auto handle = take<StringHandle>();
  const char* characters = nullptr;
  size_t length = 0;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &characters));
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  std::string taken(characters, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return taken;
}

inline void check_number_of_results(uint64_t expected, uint64_t made) {
  if (expected != made) throw std::runtime_error("fastvit: an op's schema has another number of results");
}
template <class... Results>
void write_results(StableIValue* stack, uint64_t expected, const std::tuple<Results...>& results) {
  check_number_of_results(expected, sizeof...(Results));
  std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); },
             results);
}
inline void write_results(StableIValue* stack, uint64_t expected, const Tensor& result) {
  check_number_of_results(expected, 1);
  *stack = torch::stable::detail::from(result);
}

template <class Call, class Results>
void call_function(Results (*op)(const Call&), StableIValue* stack, uint64_t arguments, uint64_t results) {
  const Call call{OpCall(stack, arguments)};
  call.check_end();
  write_results(stack, results, op(call));
}

// What a library registers for an op.
template <auto kOp>
void call_op(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_function(kOp, stack, arguments, results);
}

}  // namespace fastvit
