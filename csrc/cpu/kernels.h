// The interface between backend.cpp, compiled once, and the kernels, compiled once per instruction set.
//
// Arguments are plain structs, and the caller allocates every buffer: the kernels' files must not instantiate
// library templates, which the linker could share between instruction sets.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "../activation.h"
#include "../layout.h"

namespace fastvit {

using torch::headeronly::ScalarType;

constexpr int kPiece = 2048;  // longest run of elements processed at once; bounds the buffers on the stack

// The division of spans into pieces, and of reductions into tasks. It depends only on shapes, so results do
// not depend on the number of threads.
struct Partition {
  int64_t pieces;  // pieces per span
  int64_t piece;   // elements per piece (the last may be shorter)
  int64_t planes;  // short ones that a reduction sums together; 1 where planes are long
  int64_t steps;   // planes: N * pieces of each channel; rows: N
  int64_t slices;  // a slice is a range of steps, with one partial result per channel
  int64_t blocks;  // a block is a range of channels; a task is a (slice, block)
};

struct StatsParams {
  Layout layout;
  Partition partition;
  ScalarType dtype;
  const void* x;
  double* partial;  // [slices][2][C]: mean, M2
};

struct ReduceParams {
  Layout layout;
  Partition partition;
  ScalarType dtype;
  bool in_place;
  Activation activation;
  double activation_param, limit;
  const void *input, *dy, *z;
  const void *mean, *scale, *beta, *inverse_gamma;  // [C], accumulation type
  double* partial;  // [slices][2][C]: sum dz, and sum dz*(x - mean), or in place sum dz*xhat
};

struct ForwardParams {
  Layout layout;
  Partition partition;
  ScalarType dtype;
  Activation activation;
  double activation_param;
  const void* x;
  const void* z;
  void* y;
  const void *mean, *scale, *beta;
};

struct BackwardParams {  // dx = scale * (dz - a - b * (x - mean)), or in place scale * (dz - a - b * xhat)
  Layout layout;
  Partition partition;
  ScalarType dtype;
  bool in_place;
  Activation activation;
  double activation_param, limit;
  const void *input, *dy, *z;
  void *dx, *dz;
  const void *mean, *scale, *beta, *inverse_gamma, *a, *b;
};

struct LayerNormForwardParams {
  int64_t rows, columns;
  ScalarType dtype, output_dtype;
  double eps;
  const void* x;
  void* y;
  const void *gamma, *beta;  // [columns], accumulation type
  void* saved;               // mean[rows], invstd[rows]
};

struct LayerNormBackwardParams {
  int64_t rows, columns;
  ScalarType dtype, output_dtype;
  int64_t slices;  // of rows
  const void *x, *dy;
  void* dx;
  const void* gamma;
  const void* saved;
  // Sum dy and sum dy*xhat; null where they are not needed.
  int64_t stride;   // columns, rounded up to whole vectors
  void* group;      // [slices][2][stride], accumulation type: of a few rows
  double* partial;  // [slices][2][columns]
};

struct ActParams {  // out = act(x) (* b), or dx = dy (* b) * act'(x) and db = dy * act(x)
  Layout layout;
  Partition partition;
  ScalarType dtype;
  Activation activation;
  double activation_param;
  const void *x, *b, *dy;
  void *out, *db;
};

#define FASTVIT_DECLARE_KERNELS(capability)                 \
  namespace capability {                                    \
  void stats(const StatsParams&);                           \
  void forward(const ForwardParams&);                       \
  void reduce(const ReduceParams&);                         \
  void backward(const BackwardParams&);                     \
  void layer_norm_forward(const LayerNormForwardParams&);   \
  void layer_norm_backward(const LayerNormBackwardParams&); \
  void act_forward(const ActParams&);                       \
  void act_backward(const ActParams&);                      \
  }
FASTVIT_DECLARE_KERNELS(baseline)
FASTVIT_DECLARE_KERNELS(avx2)
FASTVIT_DECLARE_KERNELS(avx512)
#undef FASTVIT_DECLARE_KERNELS

// Values per channel in the steps before `step`.
inline int64_t values_before(const Layout& layout, const Partition& partition, int64_t step) {
  if (layout.rows) return step;
  const int64_t part = (step % partition.pieces) * partition.piece;
  return step / partition.pieces * layout.S + (part < layout.S ? part : layout.S);
}

}  // namespace fastvit
