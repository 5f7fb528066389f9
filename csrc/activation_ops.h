// Activations, y = act(x), and gates, y = act(x) * gate: the schemas of their ops (fastvit/ops.py documents
// them), the arguments of their kernels, and a function per op, which checks a call, allocates its results
// and hands both to a backend.
//
// The functions are compiled twice: into _C.so with the backend csrc/cpu, and into _cuda.so with csrc/cuda.
// Tensors with equal strides and no gaps are read as one long run of memory, whatever their shape. Others are
// read by their strides, so x and gate may be the halves of one tensor. Only a tensor of more than 5
// dimensions whose strides differ from those of the result is copied.
#pragma once

#include <tuple>

#include "op_call.h"
#include "op_checker.h"

namespace fastvit {

template <class Library>
void define_activations(Library& m) {
  m.def(
      "act_forward(Tensor x, Tensor? gate=None, str activation='gelu', float activation_param=0.0) "
      "-> Tensor y");
  m.def(
      "act_backward(Tensor x, Tensor dy, Tensor? gate=None, str activation='gelu', "
      "float activation_param=0.0) -> (Tensor dx, Tensor dgate)");
}

// The indices of an op's operands (its activation-sized tensors) in WalkLayout::strides.
struct ActForwardOperandIndex {  // of act_forward
  static constexpr int x = 0, y = 1, gate = 2;
};
struct ActBackwardOperandIndex {  // of act_backward
  static constexpr int x = 0, dy = 1, dx = 2, gate = 3, dgate = 4;
};

// The arguments of the kernels.
struct ActArgs {
  WalkLayout layout;
  ScalarType dtype;
  int device;
  Activation activation;
  double activation_param;
  const void *x, *gate;  // gate: null if the call has none
  const void* dy;        // null in forward
  void* y;               // null in backward
  void *dx, *dgate;      // null in forward; dgate is also null without a gate
};

namespace backend {
void act_forward(const ActArgs& args);
void act_backward(const ActArgs& args);
}  // namespace backend

// The arguments that both ops share. This struct and the next two read the arguments of a call in the order
// of the schema (op_call.h).
struct ActSharedArguments {
  OpCall& call;
  OptTensor gate = call.take<OptTensor>();
  std::string activation = call.take<std::string>();
  double activation_param = call.take<double>();
};
struct ActForwardCall : OpCall {
  Tensor x = take<Tensor>();
  ActSharedArguments shared{*this};
};
struct ActBackwardCall : OpCall {
  Tensor x = take<Tensor>(), dy = take<Tensor>();
  ActSharedArguments shared{*this};
};

// True if two tensors of one shape have equal strides. The stride of a dimension with one element does not
// matter.
inline bool have_equal_strides(const Tensor& tensor1, const Tensor& tensor2) {
  for (int64_t d = 0; d < tensor1.dim(); ++d)
    if (tensor1.size(d) > 1 && tensor1.stride(d) != tensor2.stride(d)) return false;
  return true;
}

// prepare() is called for each tensor that a kernel reads. make_layout() then returns the layout by which the
// kernel walks these tensors and its results.
class ActOperands {
  const Tensor& result;           // y or dx; it has no gaps
  bool has_equal_strides = true;  // each prepared tensor has the strides of the result

 public:
  explicit ActOperands(const Tensor& result) : result(result) {}

  // Copies a tensor only if its strides differ from the result's and it has more than kMaxDims dimensions.
  // The copy has the result's strides.
  Tensor prepare(const Tensor& tensor) {
    if (have_equal_strides(tensor, result)) return tensor;
    if (tensor.dim() <= kMaxDims) {
      has_equal_strides = false;
      return tensor;
    }
    Tensor copy = allocate_like(result);
    torch::stable::copy_(copy, tensor);
    return copy;
  }
  OptTensor prepare(const OptTensor& tensor) { return tensor ? OptTensor(prepare(*tensor)) : OptTensor(); }

  // An activation has no channels. With equal strides the layout has one channel with one plane, all elements
  // of a tensor. Otherwise the last dimension serves as the channels.
  WalkLayout make_layout(std::initializer_list<const Tensor*> operands) const {
    if (!has_equal_strides) return make_walk_layout(/*channel_dim=*/result.dim() - 1, operands);
    const int64_t sizes[] = {1, result.numel()}, strides[] = {result.numel(), 1};
    const int64_t* const strides_of_operands[] = {strides, strides, strides, strides, strides};
    return make_walk_layout(/*num_dims=*/2, sizes, /*channel_dim=*/0, kMaxOperands, strides_of_operands);
  }
};

// Checks the shared arguments. Returns the arguments of a kernel, without its tensors.
inline ActArgs check_act(const OpChecker& checker, const Tensor& x, const ActSharedArguments& shared) {
  checker.check_same_as_input("gate", shared.gate);
  ActArgs args{};
  args.dtype = x.scalar_type();
  args.device = x.get_device_index();
  args.activation =
      checker.check_activation(shared.activation, shared.activation_param, /*needs_inverse=*/false);
  args.activation_param = shared.activation_param;
  return args;
}

inline Tensor act_forward(const ActForwardCall& call) {
  ActArgs args = check_act(OpChecker("act_forward", "x", call.x), call.x, call.shared);
  Tensor y = allocate_like(call.x);
  ActOperands operands(y);
  const Tensor x = operands.prepare(call.x);
  const OptTensor gate = operands.prepare(call.shared.gate);
  args.layout = operands.make_layout({&x, &y, pointer_or_null(gate)});
  args.x = x.data_ptr();
  args.gate = gate ? gate->data_ptr() : nullptr;
  args.y = y.data_ptr();
  backend::act_forward(args);
  return y;
}

inline std::tuple<Tensor, Tensor> act_backward(const ActBackwardCall& call) {
  const OpChecker checker("act_backward", "x", call.x);
  checker.check_same_as_input("dy", call.dy);
  ActArgs args = check_act(checker, call.x, call.shared);
  Tensor dx = allocate_like(call.x),
         dgate = call.shared.gate ? allocate_like(call.x) : allocate_empty(call.x);
  ActOperands operands(dx);
  const Tensor x = operands.prepare(call.x), dy = operands.prepare(call.dy);
  const OptTensor gate = operands.prepare(call.shared.gate);
  args.layout = operands.make_layout({&x, &dy, &dx, pointer_or_null(gate), gate ? &dgate : nullptr});
  args.x = x.data_ptr();
  args.dy = dy.data_ptr();
  args.gate = gate ? gate->data_ptr() : nullptr;
  args.dx = dx.data_ptr();
  args.dgate = gate ? dgate.data_ptr() : nullptr;
  backend::act_backward(args);
  return {dx, dgate};
}

}  // namespace fastvit
