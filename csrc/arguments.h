// The interface between the front ends and a backend (CPU or CUDA): checked arguments, and the functions that
// a backend implements; see front_end.h.
#pragma once

#include "dtypes.h"
#include "layout.h"
#include "moments.h"
#include "sync/protocol.h"

namespace fastvit {

enum class Activation : int;  // activation_functions.h

struct Channels {  // a parameter or buffer of C numbers, or null
  void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
};

struct StatsArgs {  // operand 0: x
  Layout layout;
  ScalarType dtype;
  int device;
  const void* x;
  void* moments;                   // [2C + 2]
  const peer::Exchange* exchange;  // merges the moments over its ranks; may be null
};

struct NormArgs {  // common to all normalising ops
  Layout layout;
  ScalarType dtype;
  int device;
  bool in_place;  // an abn_* op: |gamma| has a floor, and backward reads y
  const void* z;  // may be null
  Channels weight, bias;
  Activation activation;
  double activation_param;
};

struct ForwardArgs : NormArgs {  // operands 0: x, 1: y, 2: z
  const void* x = nullptr;
  void* y = nullptr;
  // [2C + 2]; null: normalise with the running statistics, or in forward_on_chip with x's own.
  const void* moments = nullptr;
  // [2C + 2]: `saved` of an earlier forward. Then moments and saved are null.
  const void* applied = nullptr;
  Channels running_mean = {}, running_var = {};
  int64_t* num_batches_tracked = nullptr;  // may be null
  bool cumulative = false;                 // momentum=None: the factor is 1 / num_batches_tracked
  double momentum = 0, eps = 0;
  void* saved = nullptr;  // [2C + 2]
};

struct GradientArgs : NormArgs {
  const void* input = nullptr;
  const void* dy = nullptr;
  const void* saved = nullptr;  // [2C + 2]
};

struct ReduceArgs : GradientArgs {           // operands 0: x or y, 1: dy, 2: z
  void* sums = nullptr;                      // [2C]; with an exchange [2][2C]: this rank's, the group's
  const peer::Exchange* exchange = nullptr;  // may be null
};

struct BackwardArgs : GradientArgs {  // operands 0: x or y, 1: dy, 2: dx, 3: z, 4: dz
  void* dx = nullptr;
  void* dz = nullptr;          // null without z
  const void* sums = nullptr;  // [2C], over all ranks; null: the statistics were constants
  void* local_sums = nullptr;  // [2C], written by backward_on_chip, which reads no sums
};

struct LayerNormArgs {  // of rows of `columns` values, which lie side by side in x, y, dy and dx
  int64_t rows, columns;
  ScalarType dtype;         // of x and dx
  ScalarType output_dtype;  // of y and dy
  int device;
  const void* x;
  Channels weight, bias;
};

struct LayerNormForwardArgs : LayerNormArgs {
  void* y = nullptr;
  void* saved = nullptr;  // mean[rows], invstd[rows]
  double eps = 0;
};

struct LayerNormBackwardArgs : LayerNormArgs {
  const void* dy = nullptr;
  const void* saved = nullptr;
  void* dx = nullptr;
  void* sums = nullptr;  // [2 * columns]; null: not needed
};

struct ActArgs {  // forward: operands 0: x, 1: y, 2: b; backward: 0: x, 1: dy, 2: dx, 3: b, 4: db
  Layout layout;
  ScalarType dtype;
  int device;
  Activation activation;
  double activation_param;
  const void* x;
  const void* b;             // null: no gate
  const void* dy = nullptr;  // null in forward
  void* out = nullptr;       // y, or dx
  void* db = nullptr;
};

struct Backend {
  static void stats(const StatsArgs& args);
  static void forward(const ForwardArgs& args);
  static void reduce(const ReduceArgs& args);
  static void backward(const BackwardArgs& args);
  // Statistics, or sums, and the op in one launch; false where the backend does not do that.
  static bool forward_on_chip(const ForwardArgs& args);
  static bool backward_on_chip(const BackwardArgs& args);
  static void layer_norm_forward(const LayerNormForwardArgs& args);
  static void layer_norm_backward(const LayerNormBackwardArgs& args);
  static void act(const ActArgs& args);
};

// The floor of |gamma| for activations of `dtype`; 0 where nothing is inverted. fp16's is larger because of
// its short exponent. The 16-bit types have no floor relative to |beta|: 2^7 roundings of beta would be too
// large an error of y. The layer warns instead.
template <class A>
FASTVIT_INLINE GammaFloor<A> gamma_floor(bool in_place, ScalarType dtype) {
  if (!in_place) return {};
  if (dtype == ScalarType::Double) return {A(1e-12), A(0x1p-46)};
  if (dtype == ScalarType::Float) return {A(1e-7), A(0x1p-17)};
  return {dtype == ScalarType::Half ? A(1e-4) : A(1e-7), 0};
}

}  // namespace fastvit
