// The front ends of act_forward, act_backward, glu_forward and glu_backward; see front_end.h.
//
// Operands with equal strides and no gaps are walked as one plane, whatever their shape. Others are walked by
// their strides, so the halves of a packed Linear's output are not copied; beyond 5 dimensions they are
// copied.
#pragma once

#include <tuple>

#include "front_end.h"

namespace fastvit {

inline bool lies_like(const Tensor& t, const Tensor& other) {
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) > 1 && t.stride(d) != other.stride(d)) return false;
  return true;
}

// Returns y, or with dy: dx, and the gradient of the gate b if there is one.
inline std::tuple<Tensor, Optional> run_act(const char* op, Tensor x, Optional b, Optional dy,
                                            const std::string& activation, double param) {
  const char* const name = b ? "a" : "x";
  check_floating(op, name, x);
  check_memory(op, name, x);
  if (b) check_like(op, "b", *b, x);
  if (dy) check_like(op, "dy", *dy, x);
  ActArgs args{};
  args.dtype = x.scalar_type();
  args.device = x.get_device_index();
  args.activation = parse_activation(op, activation, param, false);
  args.activation_param = param;

  Tensor out = allocate_like(x);  // without gaps
  Optional db;
  if (b && dy) db = allocate_like(x);
  bool alike = true;
  for (Tensor* t : {&x, b ? &*b : nullptr, dy ? &*dy : nullptr}) {
    if (!t || lies_like(*t, out)) continue;
    if (t->dim() <= kMaxDims) {
      alike = false;
    } else {
      Tensor copy = allocate_like(out);
      torch::stable::copy_(copy, *t);
      *t = copy;
    }
  }
  const auto layout = [&](std::initializer_list<const Tensor*> operands) {
    if (!alike) return layout_of(out.dim() - 1, operands);
    const int64_t sizes[] = {1, out.numel()}, strides[] = {out.numel(), 1};
    const int64_t* const flat[] = {strides, strides, strides, strides, strides};
    return make_layout(2, sizes, 0, kMaxOperands, flat);
  };
  args.layout = dy ? layout({&x, &*dy, &out, pointer(b), pointer(db)}) : layout({&x, &out, pointer(b)});
  args.x = x.data_ptr();
  args.b = b ? b->data_ptr() : nullptr;
  args.dy = dy ? dy->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.db = db ? db->data_ptr() : nullptr;
  Backend::act(args);
  return {out, db};
}

inline Tensor act_forward(Tensor x, const std::string& activation, double param) {
  return std::get<0>(run_act("act_forward", x, {}, {}, activation, param));
}
inline Tensor glu_forward(Tensor a, Tensor b, const std::string& activation, double param) {
  return std::get<0>(run_act("glu_forward", a, b, {}, activation, param));
}
inline Tensor act_backward(Tensor x, Tensor dy, const std::string& activation, double param) {
  return std::get<0>(run_act("act_backward", x, {}, dy, activation, param));
}
inline std::tuple<Tensor, Tensor> glu_backward(Tensor a, Tensor b, Tensor dy, const std::string& activation,
                                               double param) {
  auto [da, db] = run_act("glu_backward", a, b, dy, activation, param);
  return {da, *db};
}

}  // namespace fastvit
