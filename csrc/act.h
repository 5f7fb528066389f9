// The front end of act_forward, act_backward, glu_forward and glu_backward; see front_end.h.
//
// Operands that lie alike and without gaps are one plane, whatever their shape; others are walked by their
// strides, so that the halves of a packed Linear's output are not copied. Beyond 5 dimensions they are.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "front_end.h"

namespace fastvit {

template <class Backend>
class ActOps {
  using Text = std::string;
  using Two = std::tuple<Tensor, Tensor>;

 public:
  static Tensor act_forward(Tensor x, const Text& activation, double param) {
    ActArgs args = checked("act_forward", "x", x, activation, param);
    Tensor y = allocate_like(x);
    x = fitting(x, y);
    args.layout = layout(y, x, y);
    args.x = x.data_ptr();
    args.out = y.data_ptr();
    Backend::act(args);
    return y;
  }
  static Tensor glu_forward(Tensor a, Tensor b, const Text& activation, double param) {
    ActArgs args = checked("glu_forward", "a", a, activation, param);
    check_like("glu_forward", "b", b, a);
    Tensor y = allocate_like(a);
    a = fitting(a, y), b = fitting(b, y);
    args.layout = layout(y, a, y, b);
    args.x = a.data_ptr();
    args.b = b.data_ptr();
    args.out = y.data_ptr();
    Backend::act(args);
    return y;
  }

  static Tensor act_backward(Tensor x, Tensor dy, const Text& activation, double param) {
    ActArgs args = checked("act_backward", "x", x, activation, param);
    check_like("act_backward", "dy", dy, x);
    Tensor dx = allocate_like(x);
    x = fitting(x, dx), dy = fitting(dy, dx);
    args.layout = layout(dx, x, dy, dx);
    args.x = x.data_ptr();
    args.dy = dy.data_ptr();
    args.out = dx.data_ptr();
    Backend::act(args);
    return dx;
  }
  static Two glu_backward(Tensor a, Tensor b, Tensor dy, const Text& activation, double param) {
    ActArgs args = checked("glu_backward", "a", a, activation, param);
    check_like("glu_backward", "b", b, a);
    check_like("glu_backward", "dy", dy, a);
    Tensor da = allocate_like(a), db = allocate_like(a);
    a = fitting(a, da), b = fitting(b, da), dy = fitting(dy, da);
    args.layout = layout(da, a, dy, da, b, db);
    args.x = a.data_ptr();
    args.b = b.data_ptr();
    args.dy = dy.data_ptr();
    args.out = da.data_ptr();
    args.db = db.data_ptr();
    Backend::act(args);
    return {da, db};
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("act_forward", TORCH_BOX(&act_forward));
    m.impl("act_backward", TORCH_BOX(&act_backward));
    m.impl("glu_forward", TORCH_BOX(&glu_forward));
    m.impl("glu_backward", TORCH_BOX(&glu_backward));
  }

 private:
  static ActArgs checked(const char* op, const char* name, const Tensor& x, const Text& activation,
                         double param) {
    check_floating(op, name, x);
    check_memory(op, name, x);
    ActArgs args{};
    args.dtype = x.scalar_type();
    args.device = x.get_device_index();
    args.activation = parse_activation(op, activation, param, false);
    args.activation_param = param;
    return args;
  }

  static bool lies_like(const Tensor& t, const Tensor& other) {
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) > 1 && t.stride(d) != other.stride(d)) return false;
    return true;
  }
  // `t`, or a copy that lies as `dense` does where it has more dimensions than strides can be walked by.
  static Tensor fitting(const Tensor& t, const Tensor& dense) {
    if (t.dim() <= kMaxDims || lies_like(t, dense)) return t;
    Tensor copy = allocate_like(dense);
    torch::stable::copy_(copy, t);
    return copy;
  }
  // `dense` has no gaps: a new tensor.
  template <class... Tensors>
  static Layout layout(const Tensor& dense, const Tensors&... operands) {
    if (!(lies_like(operands, dense) && ...)) return layout_of(dense.dim() - 1, operands...);
    const int64_t sizes[] = {1, dense.numel()}, strides[] = {dense.numel(), 1};
    const Operand flat[] = {((void)operands, Operand{strides})...};
    return make_layout(2, sizes, 0, sizeof...(operands), flat);
  }
};

}  // namespace fastvit
