// The interface between csrc/cpu (compiled once) and the kernels in csrc/cpu/kernels (compiled once per
// instruction set): the division of the work, the kernels' parameters, the kernel table. csrc/cpu itself does
// what is O(C), proportional to the number of channels, such as merging results and computing constants.
//
// Parameters are plain structs, and the caller allocates every buffer. A kernel's file must not instantiate a
// library's template whose instance has the same name for every instruction set, such as std::min<int64_t>:
// the linker keeps one copy, perhaps with instructions that this CPU lacks.
//
// WalkLayout views tensors as spans, runs of elements that a kernel processes in order. A span is the plane
// of one channel, `inner` elements (NCHW), or a row of all channels (channels_last, tokens: is_rows).
#pragma once

#include "../activation_ops.h"
#include "../batch_norm.h"
#include "../layer_norm.h"

namespace fastvit {

// A long span is processed in segments of at most so many elements, which bounds the kernels' buffers on the
// stack.
constexpr int64_t kMaxSegmentLength = 2048;

// The division of a call's work. Segments, units and slices depend only on the layout, and no result depends
// on the tiles, so results do not depend on the number of threads. A reduction has slices * tiles tasks: a
// task sums a tile (some channels) over a slice (some units).
struct CpuPlan {
  int64_t segments;        // number of segments into which a span is divided
  int64_t segment_length;  // elements of a segment; the last segment of a span may be shorter
  int64_t planes_at_once;  // short planes of a channel that are summed into one result; 1 if planes are long
  // Number of units. With rows, a unit is a row. With planes, a unit is the same segment of the planes of all
  // channels, at one index of the outer dimensions.
  int64_t units;
  int64_t slices;      // number of slices: a slice is a range of units, with a result per channel
  int64_t slice_step;  // a slice begins at a multiple of so many units: at a whole plane, if there are enough
  int64_t tiles;       // number of tiles: a tile is a range of channels
  int64_t numel;       // elements of each tensor of the op
  // The channels that a kernel processes: all of the op's, or a cache tile of them (cache_tiles.h). Channel 0
  // of the kernel's layout, and of the arrays that a Cpu*Params struct adds, is first_channel. A kernel reads
  // no other array with a number per channel.
  int64_t first_channel, channels;

  // The first unit of a slice, and with slice == slices the end of the last one.
  int64_t first_unit(int64_t slice) const { return units / slice_step * slice / slices * slice_step; }
};

CpuPlan plan_cpu_work(const WalkLayout& layout);

constexpr int64_t kMinTaskElements = 1 << 16;  // for fewer elements a task is not worth its start
constexpr int64_t kMaxSlices = 64;
// A result of 32 MiB or more has left the caches when the next pass or op reads it.
constexpr int64_t kMinBytesPastCache = 32 << 20;

// Each kernel's parameters: the op's checked arguments, and what the op's O(C) part adds. Arrays that are
// `const void*` or `void*` hold the accumulation type: double for tensors of double, else float.

struct CpuBnStatsParams : BnStatsArgs {
  CpuPlan plan;
  // Result, [slices][2][plan.channels]: mean and M2, the sum of squared deviations from the mean.
  double* slice_moments;
};

struct CpuBnForwardParams : BnForwardArgs {
  CpuPlan plan;
  const void *mean, *scale, *beta;  // [plan.channels]; scale is gamma * invstd
};

// For bn_reduce and bn_backward. dv is the gradient of the activation's input. bn_reduce multiplies dv by
// second_factor: x - mean, or the xhat that is recovered from y if the input is y.
struct CpuBnBackwardParams : BnBackwardArgs {
  CpuPlan plan = {};
  double max_abs_xhat = 0;  // the largest possible |xhat|, to which a recovered xhat is clamped
  // [plan.channels]; scale is gamma * invstd.
  const void *mean = nullptr, *scale = nullptr, *beta = nullptr, *inverse_gamma = nullptr;
  // Result of bn_reduce, [slices][2][plan.channels]: sum dv and sum dv * second_factor.
  double* slice_sums = nullptr;
  // Null, or a result of bn_reduce: dv, which lies in memory as the input does.
  void* dv = nullptr;
  // For bn_backward, [plan.channels]: dx = scale * (dv - mean_dv - slope * second_factor). slope *
  // second_factor is xhat * mean(dv * xhat), so slope is mean(dv * xhat), times invstd if second_factor is x
  // - mean.
  const void *mean_dv = nullptr, *slope = nullptr;
};

struct CpuLayerNormForwardParams : LayerNormArgs {
  const void *gamma, *beta;  // [columns]
};

struct CpuLayerNormBackwardParams : LayerNormArgs {
  int64_t slices;          // number of slices: a slice is a range of rows, with sums of its own
  const void* gamma;       // [columns]
  int64_t padded_columns;  // columns, rounded up to whole SIMD vectors
  // Each slice's sums of dy and of dy * xhat. chunk_sums, [slices][2][padded_columns], has the sums of one
  // chunk of at most 128 rows, and is added to slice_sums, [slices][2][columns], after each chunk. Both begin
  // as zeros. Neither is used if LayerNormArgs::sums is null.
  void* chunk_sums;
  double* slice_sums;
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
FASTVIT_DECLARE_KERNELS(baseline)  // the instruction set that the compiler takes by default
FASTVIT_DECLARE_KERNELS(avx2)
FASTVIT_DECLARE_KERNELS(avx512)
#undef FASTVIT_DECLARE_KERNELS

struct KernelTable {
  const char* name;  // of the instruction set: avx512, avx2 or baseline
  void (*bn_stats)(const CpuBnStatsParams&);
  void (*bn_forward)(const CpuBnForwardParams&);
  void (*bn_reduce)(const CpuBnBackwardParams&);
  void (*bn_backward)(const CpuBnBackwardParams&);
  void (*layer_norm_forward)(const CpuLayerNormForwardParams&);
  void (*layer_norm_backward)(const CpuLayerNormBackwardParams&);
  void (*act)(const CpuActParams&);
};

// The kernels for the best instruction set of this CPU that ATEN_CPU_CAPABILITY allows.
const KernelTable& kernel_table();

// The number of values that each channel has in the units before `unit`.
inline int64_t values_before_unit(const WalkLayout& layout, const CpuPlan& plan, int64_t unit) {
  if (layout.is_rows) return unit;
  const int64_t in_plane = (unit % plan.segments) * plan.segment_length;
  return unit / plan.segments * layout.inner + (in_plane < layout.inner ? in_plane : layout.inner);
}

}  // namespace fastvit
