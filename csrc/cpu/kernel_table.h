// The interface between the ops' O(C) parts, compiled once, and the kernels, compiled once per instruction
// set.
//
// Parameters are plain structs, and the caller allocates every buffer: the kernels' files must not
// instantiate library templates, which the linker could share between instruction sets.
#pragma once

#include "../activation_ops.h"
#include "../batch_norm.h"
#include "../layer_norm.h"

namespace fastvit {

constexpr int kMaxSegment =
    2048;  // longest run of elements processed at once; bounds the buffers on the stack

// The division of spans into pieces, and of reductions into tasks. It depends only on shapes, so results do
// not depend on the number of threads.
struct CpuPlan {
  int64_t segments;        // pieces per span
  int64_t segment_length;  // elements per piece (the last may be shorter)
  int64_t planes_at_once;  // short ones that a reduction sums together; 1 where planes are long
  int64_t units;           // planes: N * pieces of each channel; rows: N
  int64_t slices;          // a slice is a range of steps, with one partial result per channel
  int64_t tiles;           // a tile is a range of channels; a task is a (slice, tile)
};

CpuPlan plan_cpu_work(const WalkLayout& layout);

constexpr int64_t kMinTaskElements = 1 << 16;  // fewest elements that are worth a task
constexpr int64_t kMaxSlices = 64;

// An op's arguments and what its O(C) part makes for the kernel. Tables are in the accumulation type.

struct CpuBnStatsParams : BnStatsArgs {
  CpuPlan plan;
  double* partial;  // [slices][2][C]: mean, M2
};

struct CpuBnForwardParams : BnForwardArgs {
  CpuPlan plan;
  const void *mean, *scale, *beta;  // [C]
};

struct CpuBnBackwardParams : BnBackwardArgs {  // of reduce and of backward
  CpuPlan plan = {};
  double xhat_limit = 0;                                                   // of |xhat|
  const void *scale = nullptr, *beta = nullptr, *inverse_gamma = nullptr;  // [C]
  // Of reduce, [slices][2][C]: sum dv, and sum dv * centred; see kernels/bn_gradient.h.
  double* partial = nullptr;
  // Of backward, [C]: dx = scale * (dv - a - b * centred).
  const void *a = nullptr, *b = nullptr;
};

struct CpuLayerNormForwardParams : LayerNormArgs {
  const void *gamma, *beta;  // [columns]
};

struct CpuLayerNormBackwardParams : LayerNormArgs {
  int64_t slices;  // of rows
  const void* gamma;
  // Sums of dy and dy * xhat; null where args.sums is null.
  int64_t stride;    // columns, rounded up to whole vectors
  void* chunk_sums;  // [slices][2][stride], accumulation type: over kChunkRows rows
  double* partial;   // [slices][2][columns]
};

struct CpuActParams : ActArgs {
  CpuPlan plan;
};

#define FASTVIT_DECLARE_KERNELS(isa)                           \
  namespace isa {                                              \
  void bn_stats(const CpuBnStatsParams&);                      \
  void bn_forward(const CpuBnForwardParams&);                  \
  void bn_reduce(const CpuBnBackwardParams&);                  \
  void bn_backward(const CpuBnBackwardParams&);                \
  void layer_norm_forward(const CpuLayerNormForwardParams&);   \
  void layer_norm_backward(const CpuLayerNormBackwardParams&); \
  void act(const CpuActParams&);                               \
  }
FASTVIT_DECLARE_KERNELS(baseline)
FASTVIT_DECLARE_KERNELS(avx2)
FASTVIT_DECLARE_KERNELS(avx512)
#undef FASTVIT_DECLARE_KERNELS

struct KernelTable {
  const char* name;  // avx512, avx2 or baseline, the compiler's default
  void (*bn_stats)(const CpuBnStatsParams&);
  void (*bn_forward)(const CpuBnForwardParams&);
  void (*bn_reduce)(const CpuBnBackwardParams&);
  void (*bn_backward)(const CpuBnBackwardParams&);
  void (*layer_norm_forward)(const CpuLayerNormForwardParams&);
  void (*layer_norm_backward)(const CpuLayerNormBackwardParams&);
  void (*act)(const CpuActParams&);
};

const KernelTable& kernel_table();  // of the best instruction set

// Values per channel in the steps before `step`.
inline int64_t values_before_unit(const WalkLayout& layout, const CpuPlan& plan, int64_t step) {
  if (layout.is_rows) return step;
  const int64_t part = (step % plan.segments) * plan.segment_length;
  return step / plan.segments * layout.inner + (part < layout.inner ? part : layout.inner);
}

}  // namespace fastvit
