// The front end of bn_backward and abn_backward; see front_end.h.
//
// Without sums a training backward makes its own. A backend may do that in the same pass, or return false.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "front_end.h"
#include "reduce.h"

namespace fastvit {

template <class Backend>
class BackwardOps {
  using Optional = OptionalTensor;
  using Text = std::string;
  using Two = std::tuple<Tensor, Tensor>;
  using Three = std::tuple<Tensor, Tensor, Tensor>;

 public:
  static Three bn_backward(const Tensor& x, const Tensor& dy, const Optional& z, const Tensor& saved,
                           const Optional& sums, const Optional& weight, const Optional& bias,
                           const Text& activation, double param, int64_t channel_dim, bool training) {
    const NormParams norm = bn_params("bn_backward", x, z, weight, bias, activation, param, channel_dim);
    auto [dx, dz, own] = run(norm, dy, saved, sums, training);
    return {dx, dz ? *dz : allocate(x, {0}, {1}, x.scalar_type()), own};
  }
  static Two abn_backward(const Tensor& y, const Tensor& dy, const Tensor& saved, const Optional& sums,
                          const Optional& weight, const Optional& bias, const Text& activation, double param,
                          int64_t channel_dim, bool training) {
    const NormParams norm = abn_params("abn_backward", "y", y, weight, bias, activation, param, channel_dim);
    auto [dx, dz, own] = run(norm, dy, saved, sums, training);
    return {dx, own};
  }

  template <class Library>
  static void implement(Library& m) {
    m.impl("bn_backward", TORCH_BOX(&bn_backward));
    m.impl("abn_backward", TORCH_BOX(&abn_backward));
  }

 private:
  // Returns dx, dz, which is none without z, and the own sums, which are empty unless they were needed.
  static std::tuple<Tensor, Optional, Tensor> run(const NormParams& norm, const Tensor& dy,
                                                  const Tensor& saved, const Optional& sums, bool training) {
    const bool local = training && !sums;
    auto args = with_saved<BackwardArgs>(norm, dy, saved);
    const int64_t numbers = 2 * norm.channels();
    if (sums) check_packed(norm.op, "sums", *sums, norm.input, numbers);
    require(!sums || training, norm.op, "sums", "are given; None expected without training");
    Tensor dx = allocate_like(norm.input);
    Optional dz;
    if (norm.z) dz = allocate_like(*norm.z);
    Tensor own = packed(norm.input, local ? numbers : 0);
    args.layout = norm.z ? layout_of(norm.channel_dim, norm.input, dy, dx, *norm.z, *dz)
                         : layout_of(norm.channel_dim, norm.input, dy, dx);
    args.dx = dx.data_ptr();
    args.dz = dz ? dz->data_ptr() : nullptr;
    args.sums = sums ? sums->data_ptr() : nullptr;
    if (local) {
      args.local_sums = own.data_ptr();
      if (Backend::local_backward(args)) return {dx, dz, own};
      ReduceArgs reducing{args};
      reducing.layout = reduce_layout(norm, dy);
      reducing.sums = args.local_sums;
      Backend::reduce(reducing);
      args.sums = args.local_sums;
    }
    Backend::backward(args);
    return {dx, dz, own};
  }
};

}  // namespace fastvit
