// Activations and gates: the schemas of their ops, the arguments of their kernels, and their front ends; as
// batch_norm.h.
//
// Operands with equal strides and no gaps are walked as one plane, whatever their shape. Others are walked by
// their strides, so the halves of a packed Linear's output are not copied; beyond 5 dimensions they are
// copied.
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

// The places of operands in a layout's strides.
struct ActForwardStrides {
  static constexpr int x = 0, y = 1, gate = 2;
};
struct ActBackwardStrides {
  static constexpr int x = 0, dy = 1, dx = 2, gate = 3, dgate = 4;
};

struct ActArgs {
  WalkLayout layout;
  ScalarType dtype;
  int device;
  Activation activation;
  double activation_param;
  const void *x, *gate;  // gate: may be null
  const void* dy;        // null in forward
  void* y;
  void *dx, *dgate;  // dgate: null without a gate
};

namespace backend {
void act_forward(const ActArgs& args);
void act_backward(const ActArgs& args);
}  // namespace backend

struct ActTail {
  OpCall& in;
  OptTensor gate = in.take<OptTensor>();
  std::string activation = in.take<std::string>();
  double activation_param = in.take<double>();
};
struct ActForwardCall : OpCall {
  Tensor x = take<Tensor>();
  ActTail tail{*this};
};
struct ActBackwardCall : OpCall {
  Tensor x = take<Tensor>(), dy = take<Tensor>();
  ActTail tail{*this};
};

inline bool has_strides_of(const Tensor& t, const Tensor& other) {
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != other.stride(d)) return false;
  return true;
}

// Operands that are read, as kernels take them: of more than 5 dimensions with the strides of `out`.
class ActOperands {
  const Tensor& out;  // without gaps
  bool is_one_plane = true;

 public:
  explicit ActOperands(const Tensor& out) : out(out) {}

  Tensor add(const Tensor& t) {
    if (has_strides_of(t, out)) return t;
    if (t.dim() <= kMaxDims) {
      is_one_plane = false;
      return t;
    }
    Tensor copy = allocate_like(out);
    torch::stable::copy_(copy, t);
    return copy;
  }
  OptTensor add(const OptTensor& t) { return t ? OptTensor(add(*t)) : OptTensor(); }

  WalkLayout layout(std::initializer_list<const Tensor*> operands) const {
    if (!is_one_plane) return walk_layout_of(out.dim() - 1, operands);
    const int64_t sizes[] = {1, out.numel()}, strides[] = {out.numel(), 1};
    const int64_t* const flat[] = {strides, strides, strides, strides, strides};
    return make_walk_layout(2, sizes, 0, kMaxOperands, flat);
  }
};

inline ActArgs check_act(const OpChecker& check, const Tensor& x, const ActTail& tail) {
  check.check_same_as_input("gate", tail.gate);
  ActArgs args{};
  args.dtype = x.scalar_type();
  args.device = x.get_device_index();
  args.activation = check.check_activation(tail.activation, tail.activation_param, false);
  args.activation_param = tail.activation_param;
  return args;
}

inline Tensor act_forward(const ActForwardCall& call) {
  ActArgs args = check_act(OpChecker("act_forward", "x", call.x), call.x, call.tail);
  Tensor y = allocate_like(call.x);
  ActOperands operands(y);
  const Tensor x = operands.add(call.x);
  const OptTensor gate = operands.add(call.tail.gate);
  args.layout = operands.layout({&x, &y, or_null(gate)});
  args.x = x.data_ptr();
  args.gate = gate ? gate->data_ptr() : nullptr;
  args.y = y.data_ptr();
  backend::act_forward(args);
  return y;
}

inline std::tuple<Tensor, Tensor> act_backward(const ActBackwardCall& call) {
  const OpChecker check("act_backward", "x", call.x);
  check.check_same_as_input("dy", call.dy);
  ActArgs args = check_act(check, call.x, call.tail);
  Tensor dx = allocate_like(call.x), dgate = call.tail.gate ? allocate_like(call.x) : allocate_empty(call.x);
  ActOperands operands(dx);
  const Tensor x = operands.add(call.x), dy = operands.add(call.dy);
  const OptTensor gate = operands.add(call.tail.gate);
  args.layout = operands.layout({&x, &dy, &dx, or_null(gate), gate ? &dgate : nullptr});
  args.x = x.data_ptr();
  args.dy = dy.data_ptr();
  args.gate = gate ? gate->data_ptr() : nullptr;
  args.dx = dx.data_ptr();
  args.dgate = gate ? dgate.data_ptr() : nullptr;
  backend::act_backward(args);
  return {dx, dgate};
}

}  // namespace fastvit
