// Batch norm: the schemas of its ops, the arguments of its kernels, and its front ends, which check a call,
// allocate its results and hand both to a backend. fastvit/ops.py documents the ops.
//
// `_C` and `_cuda` each compile the front ends, and define the functions of `backend`. Only outputs and O(C)
// buffers are allocated; no op has an activation-sized temporary.
#pragma once

#include <tuple>

#include "moments.h"
#include "op_call.h"
#include "op_checker.h"
#include "sync/exchange_descriptor.h"

namespace fastvit {

// ------------------------------------------------------------------------------------------------- schemas

// The members of BnTail.
#define FASTVIT_BN_TAIL                                             \
  "Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, " \
  "str activation='identity', float activation_param=0.01, int channel_dim=1"

// bn_forward_inplace returns `saved` and not x: autograd learns of the write by mark_dirty(x). torch.compile
// traces bn_forward(invertible=True), which returns a new tensor. Moments and sums are packed, so that ranks
// exchange each with one collective.
template <class Library>
void define_batch_norm(Library& m) {
  m.def("bn_stats(Tensor x, int channel_dim=1, Tensor? exchange=None) -> Tensor moments");
  m.def("bn_forward(Tensor x, " FASTVIT_BN_TAIL
        ", Tensor? moments=None, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, "
        "Tensor(c!)? num_batches_tracked=None, float? momentum=0.1, float eps=1e-05, bool training=True, "
        "bool invertible=False) -> (Tensor y, Tensor saved)");
  m.def("bn_forward_inplace(Tensor(a!) x, " FASTVIT_BN_TAIL
        ", Tensor? moments=None, Tensor(b!)? running_mean=None, Tensor(c!)? running_var=None, "
        "Tensor(d!)? num_batches_tracked=None, float? momentum=0.1, float eps=1e-05, bool training=True) "
        "-> Tensor saved");
  m.def("bn_apply(Tensor x, Tensor saved, " FASTVIT_BN_TAIL ") -> Tensor y");
  m.def("bn_reduce(Tensor input, Tensor dy, Tensor saved, " FASTVIT_BN_TAIL
        ", bool from_output=False, Tensor? exchange=None) -> Tensor sums");
  m.def("bn_backward(Tensor input, Tensor dy, Tensor saved, " FASTVIT_BN_TAIL
        ", bool from_output=False, Tensor? global_sums=None, bool training=True) "
        "-> (Tensor dx, Tensor dresidual, Tensor local_sums)");
}

// ------------------------------------------------------------------------------------ arguments of kernels

// The places of operands in a layout's strides.
struct ForwardStrides {
  static constexpr int x = 0, y = 1, residual = 2;
};
struct ReduceStrides {
  static constexpr int input = 0, dy = 1, residual = 2;
};
struct BackwardStrides {
  static constexpr int input = 0, dy = 1, dx = 2, residual = 3, dresidual = 4;
};

struct BnStatsArgs {
  WalkLayout layout;
  ScalarType dtype;
  int device;
  const void* x;
  void* moments;                   // [2C + 2]
  const peer::Exchange* exchange;  // merges the moments over its ranks; may be null
};

struct BnArgs {  // common to the other ops
  WalkLayout layout;
  ScalarType dtype;
  int device;
  ChannelVector weight, bias;
  const void* residual;  // may be null
  Activation activation;
  double activation_param;
};

struct BnForwardArgs : BnArgs {
  bool invertible = false;  // |gamma| has a floor, so that x can be recovered from y
  const void* x = nullptr;
  void* y = nullptr;
  // [2C + 2]. Null: bn_forward normalises with the running statistics, bn_forward_single_launch with x's own.
  const void* moments = nullptr;
  // [2C + 2]: `saved` of an earlier forward. Then moments and saved are null.
  const void* saved_in = nullptr;
  ChannelVector running_mean = {}, running_var = {};
  int64_t* num_batches_tracked = nullptr;  // may be null
  bool cumulative_average = false;         // momentum=None: the factor is 1 / num_batches_tracked
  double momentum = 0, eps = 0;
  void* saved = nullptr;  // [2C + 2]
};

struct BnBackwardArgs : BnArgs {  // also of bn_reduce, whose layout has the operands of ReduceStrides
  bool from_output = false;       // the input is y, from which x is recovered; else it is x
  const void* input = nullptr;
  const void* dy = nullptr;
  const void* saved = nullptr;  // [2C + 2]
  void* dx = nullptr;
  void* dresidual = nullptr;          // null without a residual
  const void* global_sums = nullptr;  // [2C]; null in bn_backward: the statistics were constants
  // [2C], written by bn_reduce and bn_backward_single_launch; with an exchange [2][2C]: local and global.
  void* local_sums = nullptr;
  const peer::Exchange* exchange = nullptr;  // may be null
};

// The floor of |gamma| for activations of `dtype`; 0 where nothing is inverted. fp16's is larger because of
// its short exponent. The 16-bit types have no floor relative to |beta|: 2^7 roundings of beta would be too
// large an error of y. The layer warns instead.
template <class A>
FASTVIT_HOST_DEVICE GammaFloor<A> gamma_floor(bool invertible, ScalarType dtype) {
  if (!invertible) return {};
  if (dtype == ScalarType::Double) return {A(1e-12), A(0x1p-46)};
  if (dtype == ScalarType::Float) return {A(1e-7), A(0x1p-17)};
  return {dtype == ScalarType::Half ? A(1e-4) : A(1e-7), 0};
}

namespace backend {
void bn_stats(const BnStatsArgs& args);
void bn_forward(const BnForwardArgs& args);
void bn_reduce(const BnBackwardArgs& args);
void bn_backward(const BnBackwardArgs& args);
// Statistics, or sums, and the op in one launch; false where the backend does not do that.
bool bn_forward_single_launch(const BnForwardArgs& args);
bool bn_backward_single_launch(const BnBackwardArgs& args);
}  // namespace backend

// -------------------------------------------------------------------------------------- arguments of calls

struct BnTail {
  OpCall& in;
  OptTensor weight = in.take<OptTensor>(), bias = in.take<OptTensor>(), residual = in.take<OptTensor>();
  std::string activation = in.take<std::string>();
  double activation_param = in.take<double>();
  int64_t channel_dim = in.take<int64_t>();
};

struct BnStatsCall : OpCall {
  Tensor x = take<Tensor>();
  int64_t channel_dim = take<int64_t>();
  OptTensor exchange = take<OptTensor>();
};

struct BnForwardInplaceCall : OpCall {
  Tensor x = take<Tensor>();
  BnTail tail{*this};
  OptTensor moments = take<OptTensor>(), running_mean = take<OptTensor>(), running_var = take<OptTensor>(),
            num_batches_tracked = take<OptTensor>();
  std::optional<double> momentum = take<std::optional<double>>();
  double eps = take<double>();
  bool training = take<bool>();
};
struct BnForwardCall : BnForwardInplaceCall {
  bool invertible = take<bool>();
};

struct BnApplyCall : OpCall {
  Tensor x = take<Tensor>(), saved = take<Tensor>();
  BnTail tail{*this};
};

struct BnGradientCall : OpCall {
  Tensor input = take<Tensor>(), dy = take<Tensor>(), saved = take<Tensor>();
  BnTail tail{*this};
  bool from_output = take<bool>();
};
struct BnReduceCall : BnGradientCall {
  OptTensor exchange = take<OptTensor>();
};
struct BnBackwardCall : BnGradientCall {
  OptTensor global_sums = take<OptTensor>();
  bool training = take<bool>();
};

// ---------------------------------------------------------------------------------------------- front ends

// The checks of a batch norm's op, whose input has C channels.
struct BnChecker : OpChecker {
  int64_t channel_dim, C;

  BnChecker(const char* op, const char* name, const Tensor& input, int64_t channel_dim)
      : OpChecker(op, name, input), channel_dim(channel_dim), C(check_channel_dim(channel_dim)) {}

  WalkLayout layout(std::initializer_list<const Tensor*> operands) const {
    return walk_layout_of(channel_dim, operands);
  }
  const void* check_saved(const Tensor& saved) const { return check_packed("saved", saved, 2 * C + 2); }
  std::optional<peer::Exchange> check_exchange(const OptTensor& exchange, int64_t numbers,
                                               peer::NumberKind kind) const {
    if (!exchange) return std::nullopt;
    return peer::make_exchange(op, *exchange, numbers, accumulation_type(input.scalar_type()), kind);
  }

  // What all kernels but bn_stats's take, without the layout.
  BnArgs check_tail(const BnTail& tail, bool invertible) const {
    require(!tail.residual || !invertible, "residual", "is given; None expected where x is recovered from y");
    return {.layout = {},
            .dtype = input.scalar_type(),
            .device = input.get_device_index(),
            .weight = check_channel_vector("weight", tail.weight, C),
            .bias = check_channel_vector("bias", tail.bias, C),
            .residual = check_same_as_input("residual", tail.residual),
            .activation = check_activation(tail.activation, tail.activation_param, invertible),
            .activation_param = tail.activation_param};
  }
};

// The moments of x, [2C + 2], or with an exchange of all its ranks.
inline Tensor compute_moments(const BnChecker& check, const Tensor& x, const peer::Exchange* exchange) {
  Tensor moments = check.new_packed(2 * check.C + 2);
  backend::bn_stats({.layout = check.layout({&x}),
                     .dtype = x.scalar_type(),
                     .device = x.get_device_index(),
                     .x = x.data_ptr(),
                     .moments = moments.data_ptr(),
                     .exchange = exchange});
  return moments;
}

inline Tensor bn_stats(const BnStatsCall& call) {
  const BnChecker check("bn_stats", "x", call.x, call.channel_dim);
  const auto exchange = check.check_exchange(call.exchange, 2 * check.C + 2, peer::kMoments);
  return compute_moments(check, call.x, exchange ? &*exchange : nullptr);
}

inline BnForwardArgs check_forward(const BnChecker& check, const BnForwardInplaceCall& call,
                                   bool invertible) {
  BnForwardArgs args{check.check_tail(call.tail, invertible)};
  args.invertible = invertible;
  args.moments = check.check_packed("moments", call.moments, 2 * check.C + 2);
  args.running_mean = check.check_channel_vector("running_mean", call.running_mean, check.C);
  args.running_var = check.check_channel_vector("running_var", call.running_var, check.C);
  args.num_batches_tracked = check.check_counter("num_batches_tracked", call.num_batches_tracked);
  args.cumulative_average = !call.momentum;
  args.momentum = call.momentum.value_or(0);
  args.eps = check.check_eps(call.eps);
  check.require(args.momentum >= 0 && args.momentum <= 1, "momentum", "is ", args.momentum,
                "; 0 to 1, or None, expected");
  check.require(call.running_mean.has_value() == call.running_var.has_value(), "running_mean",
                "and running_var must be given together or not at all");
  check.require(call.training || !call.moments, "moments", "are given; None expected without training");
  check.require(call.training || call.running_mean, "running_mean",
                "is None; without training, running_mean and running_var expected");
  check.require(!call.training || call.momentum || call.num_batches_tracked || !call.running_mean, "momentum",
                "is None (cumulative_average average), which needs num_batches_tracked");
  return args;
}

// Writes y and the running statistics; returns `saved`. Without moments a training forward makes x's own.
inline Tensor normalize_into(const Tensor& y, const BnChecker& check, const BnForwardInplaceCall& call,
                             BnForwardArgs args) {
  Tensor saved = check.new_packed(2 * check.C + 2);
  args.layout = check.layout({&call.x, &y, or_null(call.tail.residual)});
  args.x = call.x.data_ptr();
  args.y = y.data_ptr();
  args.saved = saved.data_ptr();
  OptTensor moments;  // of x, which bn_forward reads
  if (call.training && !call.moments) {
    if (backend::bn_forward_single_launch(args)) return saved;
    moments = compute_moments(check, call.x, nullptr);
    args.moments = moments->data_ptr();
  }
  backend::bn_forward(args);
  return saved;
}

inline std::tuple<Tensor, Tensor> bn_forward(const BnForwardCall& call) {
  const BnChecker check("bn_forward", "x", call.x, call.tail.channel_dim);
  const BnForwardArgs args = check_forward(check, call, call.invertible);
  Tensor y = allocate_like(call.x);
  return {y, normalize_into(y, check, call, args)};
}

inline Tensor bn_forward_inplace(const BnForwardInplaceCall& call) {
  const BnChecker check("bn_forward_inplace", "x", call.x, call.tail.channel_dim);
  check.check_writable();
  return normalize_into(call.x, check, call, check_forward(check, call, true));
}

inline Tensor bn_apply(const BnApplyCall& call) {
  const BnChecker check("bn_apply", "x", call.x, call.tail.channel_dim);
  BnForwardArgs args{check.check_tail(call.tail, false)};
  args.saved_in = check.check_saved(call.saved);
  Tensor y = allocate_like(call.x);
  args.layout = check.layout({&call.x, &y, or_null(call.tail.residual)});
  args.x = call.x.data_ptr();
  args.y = y.data_ptr();
  backend::bn_forward(args);
  return y;
}

inline BnBackwardArgs check_gradient(const BnChecker& check, const BnGradientCall& call) {
  BnBackwardArgs args{check.check_tail(call.tail, call.from_output)};
  args.from_output = call.from_output;
  args.input = call.input.data_ptr();
  args.dy = check.check_same_as_input("dy", call.dy);
  args.saved = check.check_saved(call.saved);
  return args;
}

// Writes the sums of this rank, and with args.exchange those of its group.
inline void reduce_into(const Tensor& sums, const BnChecker& check, const BnGradientCall& call,
                        BnBackwardArgs args) {
  args.layout = check.layout({&call.input, &call.dy, or_null(call.tail.residual)});
  args.local_sums = sums.data_ptr();
  backend::bn_reduce(args);
}

inline Tensor bn_reduce(const BnReduceCall& call) {
  const BnChecker check("bn_reduce", "input", call.input, call.tail.channel_dim);
  BnBackwardArgs args = check_gradient(check, call);
  const int64_t numbers = 2 * check.C;
  const auto exchange = check.check_exchange(call.exchange, numbers, peer::kSums);
  args.exchange = exchange ? &*exchange : nullptr;
  Tensor sums = check.new_packed(exchange ? 2 : 1, numbers);
  reduce_into(sums, check, call, args);
  return sums;
}

// dx; dresidual, empty without a residual; and this rank's sums, which a training backward without global
// sums makes. They are empty otherwise.
inline std::tuple<Tensor, Tensor, Tensor> bn_backward(const BnBackwardCall& call) {
  const BnChecker check("bn_backward", "input", call.input, call.tail.channel_dim);
  BnBackwardArgs args = check_gradient(check, call);
  args.global_sums = check.check_packed("global_sums", call.global_sums, 2 * check.C);
  check.require(!call.global_sums || call.training, "global_sums",
                "are given; None expected without training");
  const OptTensor& residual = call.tail.residual;
  const bool computes_sums = call.training && !call.global_sums;
  Tensor dx = allocate_like(call.input), local_sums = check.new_packed(computes_sums ? 2 * check.C : 0);
  Tensor dresidual = residual ? allocate_like(*residual) : allocate_empty(call.input);
  args.layout =
      check.layout({&call.input, &call.dy, &dx, or_null(residual), residual ? &dresidual : nullptr});
  args.dx = dx.data_ptr();
  args.dresidual = residual ? dresidual.data_ptr() : nullptr;
  args.local_sums = computes_sums ? local_sums.data_ptr() : nullptr;
  if (!computes_sums || !backend::bn_backward_single_launch(args)) {
    if (computes_sums) {
      reduce_into(local_sums, check, call, args);
      args.global_sums = args.local_sums;
    }
    backend::bn_backward(args);
  }
  return {dx, dresidual, local_sums};
}

}  // namespace fastvit
