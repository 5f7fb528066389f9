// Batch norm: the schemas of its ops (fastvit/ops.py documents them), the arguments of its kernels, and a
// function per op, which checks a call, allocates its results and hands both to a backend.
//
// The functions are compiled twice: into _C.so with the backend csrc/cpu, and into _cuda.so with csrc/cuda.
// They allocate only results and tensors of O(C) numbers, never a temporary of the size of x.
//
// The numbers of all channels are packed into one tensor, so that ranks exchange moments or sums at once:
//   moments  mean[C], M2[C], count: M2 is the sum of squared deviations; count takes two numbers (moments.h)
//   saved    mean[C], invstd[C], count: the statistics that a forward applied, for its backward
//   sums     C sums of dv, C sums of dv * xhat: dv is the gradient of the activation's input, xhat the
//            normalized x
#pragma once

#include <tuple>

#include "moments.h"
#include "op_call.h"
#include "op_checker.h"
#include "sync/exchange_descriptor.h"

namespace fastvit {

// ------------------------------------------------------------------------------------------------- schemas
// The arguments that all ops but bn_stats share. BnSharedArguments reads them from a call.
#define FASTVIT_BN_SHARED_ARGUMENTS                                 \
  "Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, " \
  "str activation='identity', float activation_param=0.01, int channel_dim=1"

// bn_forward_inplace does not return x; its caller tells autograd of the write by mark_dirty(x).
// torch.compile traces bn_forward with invertible=True instead, which writes the same y to a new tensor.
// `input` of bn_reduce and bn_backward is x. If from_output is true it is y, from which they recover x.
template <class Library>
void define_batch_norm(Library& m) {
  m.def("bn_stats(Tensor x, int channel_dim=1, Tensor? exchange=None) -> Tensor moments");
  m.def("bn_forward(Tensor x, " FASTVIT_BN_SHARED_ARGUMENTS
        ", Tensor? moments=None, Tensor(a!)? running_mean=None, Tensor(b!)? running_var=None, "
        "Tensor(c!)? num_batches_tracked=None, float? momentum=0.1, float eps=1e-05, bool training=True, "
        "bool invertible=False) -> (Tensor y, Tensor saved)");
  m.def("bn_forward_inplace(Tensor(a!) x, " FASTVIT_BN_SHARED_ARGUMENTS
        ", Tensor? moments=None, Tensor(b!)? running_mean=None, Tensor(c!)? running_var=None, "
        "Tensor(d!)? num_batches_tracked=None, float? momentum=0.1, float eps=1e-05, bool training=True) "
        "-> Tensor saved");
  m.def("bn_apply(Tensor x, Tensor saved, " FASTVIT_BN_SHARED_ARGUMENTS ") -> Tensor y");
  m.def("bn_reduce(Tensor input, Tensor dy, Tensor saved, " FASTVIT_BN_SHARED_ARGUMENTS
        ", bool from_output=False, Tensor? exchange=None) -> Tensor sums");
  m.def("bn_backward(Tensor input, Tensor dy, Tensor saved, " FASTVIT_BN_SHARED_ARGUMENTS
        ", bool from_output=False, Tensor? global_sums=None, bool training=True) "
        "-> (Tensor dx, Tensor dresidual, Tensor local_sums)");
}

// ------------------------------------------------------------------------------------ arguments of kernels
// The indices of an op's operands (its activation-sized tensors) in WalkLayout::strides.
struct ForwardOperandIndex {  // of bn_stats, bn_forward, bn_forward_inplace and bn_apply
  static constexpr int x = 0, y = 1, residual = 2;
};
struct ReduceOperandIndex {  // of bn_reduce
  static constexpr int input = 0, dy = 1, residual = 2;
};
struct BackwardOperandIndex {  // of bn_backward
  static constexpr int input = 0, dy = 1, dx = 2, residual = 3, dresidual = 4;
};

struct BnStatsArgs {
  WalkLayout layout;
  ScalarType dtype;
  int device;
  const void* x;
  void* moments;                   // [2C + 2], the result
  const peer::Exchange* exchange;  // null, or the ranks over which bn_stats merges the moments
};

// The arguments that the kernels of all ops but bn_stats share.
struct BnArgs {
  WalkLayout layout;
  ScalarType dtype;
  int device;
  ChannelVector weight, bias;
  const void* residual;  // null: the call has none
  Activation activation;
  double activation_param;
};

// The arguments of the kernels of bn_forward, bn_forward_inplace and bn_apply.
struct BnForwardArgs : BnArgs {
  bool invertible = false;  // |gamma| is raised to its floor, gamma_floor(), so that y gives x
  const void* x = nullptr;
  void* y = nullptr;
  // [2C + 2], of this rank's x or of all ranks'. Null for bn_forward_single_launch, which computes them. If
  // they are null for backend::bn_forward, it normalizes by saved_in or by the running statistics.
  const void* moments = nullptr;
  // [2C + 2], `saved` of an earlier forward, by which bn_apply normalizes. moments and saved are null then.
  const void* saved_in = nullptr;
  ChannelVector running_mean = {}, running_var = {};
  int64_t* num_batches_tracked = nullptr;  // null: the call has none
  bool cumulative_average = false;  // momentum=None: running statistics average all forwards in training
  double momentum = 0, eps = 0;
  void* saved = nullptr;  // [2C + 2], a result
};

// The arguments of the kernels of bn_reduce and bn_backward.
struct BnBackwardArgs : BnArgs {
  bool from_output = false;  // true: input is y, from which x is recovered; false: input is x
  const void* input = nullptr;
  const void* dy = nullptr;
  const void* saved = nullptr;  // [2C + 2]
  void* dx = nullptr;
  void* dresidual = nullptr;  // null without a residual
  // [2C], the sums of all ranks, for backend::bn_backward. They are null if the statistics were constants
  // (running statistics). bn_reduce and bn_backward_single_launch compute sums and do not read these.
  const void* global_sums = nullptr;
  // Result of bn_reduce and bn_backward_single_launch: this rank's sums, [2C]. With an exchange the global
  // sums follow them, [2][2C].
  void* local_sums = nullptr;
  const peer::Exchange* exchange = nullptr;  // null, or the ranks over which bn_reduce adds the sums
};

// Returns the floor of |gamma|, max(min_magnitude, beta_factor * |beta|); 0 unless `invertible`. float16 has
// a larger min_magnitude because its exponent is short. beta_factor = 2^7 u, with the relative error u of a
// rounding, keeps the error of a recovered xhat below 2^-7. It is 0 for types of 16 bits: 1/16 or 1/2 would
// often raise |gamma|, and change y. The Python layer warns of a large |beta| / |gamma| instead.
template <class A>
FASTVIT_HOST_DEVICE GammaFloor<A> gamma_floor(bool invertible, ScalarType dtype) {
  if (!invertible) return {};
  if (dtype == ScalarType::Double)
    return {.min_magnitude = A(1e-12), .beta_factor = A(0x1p-46)};  // 2^7 u, u = 2^-53
  if (dtype == ScalarType::Float)
    return {.min_magnitude = A(1e-7), .beta_factor = A(0x1p-17)};  // 2^7 u, u = 2^-24
  return {.min_magnitude = dtype == ScalarType::Half ? A(1e-4) : A(1e-7), .beta_factor = 0};
}

namespace backend {
void bn_stats(const BnStatsArgs& args);
void bn_forward(const BnForwardArgs& args);
void bn_reduce(const BnBackwardArgs& args);
void bn_backward(const BnBackwardArgs& args);
// Each runs the op and its reduction (moments of x, or sums) in one kernel launch, or on a CPU tile by tile,
// and returns true; or does nothing and returns false, if the backend cannot for these arguments.
bool bn_forward_single_launch(const BnForwardArgs& args);
bool bn_backward_single_launch(const BnBackwardArgs& args);
}  // namespace backend

// -------------------------------------------------------------------------------------- arguments of calls
// Each struct reads the arguments of a call in the order of the schema (op_call.h). They are not checked yet.
struct BnSharedArguments {
  OpCall& call;
  OptTensor weight = call.take<OptTensor>(), bias = call.take<OptTensor>(), residual = call.take<OptTensor>();
  std::string activation = call.take<std::string>();
  double activation_param = call.take<double>();
  int64_t channel_dim = call.take<int64_t>();
};

struct BnStatsCall : OpCall {
  Tensor x = take<Tensor>();
  int64_t channel_dim = take<int64_t>();
  OptTensor exchange = take<OptTensor>();
};

struct BnForwardInplaceCall : OpCall {
  Tensor x = take<Tensor>();
  BnSharedArguments shared{*this};
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
  BnSharedArguments shared{*this};
};

// The arguments that bn_reduce and bn_backward share.
struct BnGradientCall : OpCall {
  Tensor input = take<Tensor>(), dy = take<Tensor>(), saved = take<Tensor>();
  BnSharedArguments shared{*this};
  bool from_output = take<bool>();
};
struct BnReduceCall : BnGradientCall {
  OptTensor exchange = take<OptTensor>();
};
struct BnBackwardCall : BnGradientCall {
  OptTensor global_sums = take<OptTensor>();
  bool training = take<bool>();
};

// --------------------------------------------------------------------------------------- functions of ops
// The checks of an op of batch norm, whose input has C channels.
struct BnChecker : OpChecker {
  int64_t channel_dim, C;

  BnChecker(const char* op, const char* input_name, const Tensor& input, int64_t channel_dim)
      : OpChecker(op, input_name, input), channel_dim(channel_dim), C(check_channel_dim(channel_dim)) {}

  WalkLayout make_layout(std::initializer_list<const Tensor*> operands) const {
    return make_walk_layout(channel_dim, operands);
  }
  const void* check_saved(const Tensor& saved) const {
    return check_accumulation_tensor("saved", saved, 2 * C + 2);
  }
  std::optional<peer::Exchange> check_exchange(const OptTensor& exchange, int64_t numbers,
                                               peer::NumberKind kind) const {
    if (!exchange) return std::nullopt;
    return peer::make_exchange(op, *exchange, numbers, accumulation_type(input.scalar_type()), kind);
  }

  // Returns the shared arguments, with an empty layout. needs_inverse: backward recovers x from y.
  BnArgs check_shared(const BnSharedArguments& shared, bool needs_inverse) const {
    require(!shared.residual || !needs_inverse, "residual",
            "is given; None expected where x is recovered from y");
    return {.layout = {},
            .dtype = input.scalar_type(),
            .device = input.get_device_index(),
            .weight = check_channel_vector("weight", shared.weight, C),
            .bias = check_channel_vector("bias", shared.bias, C),
            .residual = check_same_as_input("residual", shared.residual),
            .activation = check_activation(shared.activation, shared.activation_param, needs_inverse),
            .activation_param = shared.activation_param};
  }
};

// Returns the moments of x, [2C + 2], or with an exchange those of the x of all its ranks.
inline Tensor compute_moments(const BnChecker& checker, const Tensor& x, const peer::Exchange* exchange) {
  Tensor moments = checker.new_accumulation_tensor(2 * checker.C + 2);
  backend::bn_stats({.layout = checker.make_layout({&x}),
                     .dtype = x.scalar_type(),
                     .device = x.get_device_index(),
                     .x = x.data_ptr(),
                     .moments = moments.data_ptr(),
                     .exchange = exchange});
  return moments;
}

inline Tensor bn_stats(const BnStatsCall& call) {
  const BnChecker checker("bn_stats", "x", call.x, call.channel_dim);
  const auto exchange = checker.check_exchange(call.exchange, 2 * checker.C + 2, peer::kMoments);
  return compute_moments(checker, call.x, exchange ? &*exchange : nullptr);
}

// Returns the arguments of a forward's kernel. normalize_into adds layout, x, y and saved.
inline BnForwardArgs check_forward(const BnChecker& checker, const BnForwardInplaceCall& call,
                                   bool invertible) {
  BnForwardArgs args{checker.check_shared(call.shared, invertible)};
  args.invertible = invertible;
  args.moments = checker.check_accumulation_tensor("moments", call.moments, 2 * checker.C + 2);
  args.running_mean = checker.check_channel_vector("running_mean", call.running_mean, checker.C);
  args.running_var = checker.check_channel_vector("running_var", call.running_var, checker.C);
  args.num_batches_tracked = checker.check_counter("num_batches_tracked", call.num_batches_tracked);
  args.cumulative_average = !call.momentum;
  args.momentum = call.momentum.value_or(0);
  args.eps = checker.check_eps(call.eps);
  checker.require(args.momentum >= 0 && args.momentum <= 1, "momentum", "is ", args.momentum,
                  "; 0 to 1, or None, expected");
  checker.require(call.running_mean.has_value() == call.running_var.has_value(), "running_mean",
                  "and running_var must be given together or not at all");
  checker.require(call.training || !call.moments, "moments", "are given; None expected without training");
  checker.require(call.training || call.running_mean, "running_mean",
                  "is None; without training, running_mean and running_var expected");
  checker.require(!call.training || call.momentum || call.num_batches_tracked || !call.running_mean,
                  "momentum", "is None (cumulative average), which needs num_batches_tracked");
  return args;
}

// Writes y and the running statistics; returns `saved`. Without moments in training, the moments of x are
// computed: in the same launch where the backend can, else by bn_stats.
inline Tensor normalize_into(const Tensor& y, const BnChecker& checker, const BnForwardInplaceCall& call,
                             BnForwardArgs args) {
  Tensor saved = checker.new_accumulation_tensor(2 * checker.C + 2);
  args.layout = checker.make_layout({&call.x, &y, pointer_or_null(call.shared.residual)});
  args.x = call.x.data_ptr();
  args.y = y.data_ptr();
  args.saved = saved.data_ptr();
  OptTensor moments;  // owns the memory of args.moments until bn_forward has been called
  if (call.training && !call.moments) {
    if (backend::bn_forward_single_launch(args)) return saved;
    moments = compute_moments(checker, call.x, /*exchange=*/nullptr);
    args.moments = moments->data_ptr();
  }
  backend::bn_forward(args);
  return saved;
}

inline std::tuple<Tensor, Tensor> bn_forward(const BnForwardCall& call) {
  const BnChecker checker("bn_forward", "x", call.x, call.shared.channel_dim);
  const BnForwardArgs args = check_forward(checker, call, call.invertible);
  Tensor y = allocate_like(call.x);
  return {y, normalize_into(y, checker, call, args)};
}

inline Tensor bn_forward_inplace(const BnForwardInplaceCall& call) {
  const BnChecker checker("bn_forward_inplace", "x", call.x, call.shared.channel_dim);
  checker.check_writable();
  return normalize_into(call.x, checker, call, check_forward(checker, call, /*invertible=*/true));
}

inline Tensor bn_apply(const BnApplyCall& call) {
  const BnChecker checker("bn_apply", "x", call.x, call.shared.channel_dim);
  BnForwardArgs args{checker.check_shared(call.shared, /*needs_inverse=*/false)};
  args.saved_in = checker.check_saved(call.saved);
  Tensor y = allocate_like(call.x);
  args.layout = checker.make_layout({&call.x, &y, pointer_or_null(call.shared.residual)});
  args.x = call.x.data_ptr();
  args.y = y.data_ptr();
  backend::bn_forward(args);
  return y;
}

// Returns the kernel arguments that bn_reduce and bn_backward share, without the layout.
inline BnBackwardArgs check_gradient(const BnChecker& checker, const BnGradientCall& call) {
  BnBackwardArgs args{checker.check_shared(call.shared, call.from_output)};
  args.from_output = call.from_output;
  args.input = call.input.data_ptr();
  args.dy = checker.check_same_as_input("dy", call.dy);
  args.saved = checker.check_saved(call.saved);
  return args;
}

// Writes the 2C sums of this rank to `sums`, and with args.exchange those of all ranks after them.
inline void reduce_into(const Tensor& sums, const BnChecker& checker, const BnGradientCall& call,
                        BnBackwardArgs args) {
  args.layout = checker.make_layout({&call.input, &call.dy, pointer_or_null(call.shared.residual)});
  args.local_sums = sums.data_ptr();
  backend::bn_reduce(args);
}

inline Tensor bn_reduce(const BnReduceCall& call) {
  const BnChecker checker("bn_reduce", "input", call.input, call.shared.channel_dim);
  BnBackwardArgs args = check_gradient(checker, call);
  const int64_t numbers = 2 * checker.C;
  const auto exchange = checker.check_exchange(call.exchange, numbers, peer::kSums);
  args.exchange = exchange ? &*exchange : nullptr;
  Tensor sums = checker.new_accumulation_tensor(exchange ? 2 : 1, numbers);
  reduce_into(sums, checker, call, args);
  return sums;
}

// Returns dx, dresidual and local_sums. dresidual is empty without a residual. local_sums, the sums of this
// rank, are computed in training without global_sums, and empty otherwise.
inline std::tuple<Tensor, Tensor, Tensor> bn_backward(const BnBackwardCall& call) {
  const BnChecker checker("bn_backward", "input", call.input, call.shared.channel_dim);
  BnBackwardArgs args = check_gradient(checker, call);
  args.global_sums = checker.check_accumulation_tensor("global_sums", call.global_sums, 2 * checker.C);
  checker.require(!call.global_sums || call.training, "global_sums",
                  "are given; None expected without training");
  const OptTensor& residual = call.shared.residual;
  const bool computes_sums = call.training && !call.global_sums;
  Tensor dx = allocate_like(call.input),
         local_sums = checker.new_accumulation_tensor(computes_sums ? 2 * checker.C : 0);
  Tensor dresidual = residual ? allocate_like(*residual) : allocate_empty(call.input);
  args.layout = checker.make_layout(
      {&call.input, &call.dy, &dx, pointer_or_null(residual), residual ? &dresidual : nullptr});
  args.dx = dx.data_ptr();
  args.dresidual = residual ? dresidual.data_ptr() : nullptr;
  args.local_sums = computes_sums ? local_sums.data_ptr() : nullptr;
  if (!computes_sums || !backend::bn_backward_single_launch(args)) {
    if (computes_sums) {
      reduce_into(local_sums, checker, call, args);
      args.global_sums = args.local_sums;
    }
    backend::bn_backward(args);
  }
  return {dx, dresidual, local_sums};
}

}  // namespace fastvit
