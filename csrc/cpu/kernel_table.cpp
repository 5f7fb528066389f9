// Chooses the kernels for the best instruction set of this CPU, and divides the work of a call.
#include "kernel_table.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastvit {
namespace {

// The best instruction set of this CPU. The environment variable ATEN_CPU_CAPABILITY=default|avx2|avx512
// lowers the choice, as in torch.
std::string find_best_isa() {
#if defined(__x86_64__)
  const char* requested = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string highest = requested ? requested : "avx512";
  // Older clangs do not know "f16c" in __builtin_cpu_supports.
  unsigned eax, ebx, ecx, edx;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  if (has_avx512 && highest == "avx512") return "avx512";
  if (has_avx2 && highest != "default") return "avx2";
#endif
  return "baseline";
}

#define FASTVIT_KERNEL_TABLE(isa)                                                                    \
  KernelTable {                                                                                      \
    #isa, isa::bn_stats, isa::bn_forward, isa::bn_reduce, isa::bn_backward, isa::layer_norm_forward, \
        isa::layer_norm_backward, isa::act                                                           \
  }

// setup.py defines FASTVIT_HAS_* for the instruction sets for which it compiles the kernels.
KernelTable select_kernel_table() {
  const std::string isa = find_best_isa();
#if defined(FASTVIT_HAS_AVX512)
  if (isa == "avx512") return FASTVIT_KERNEL_TABLE(avx512);
#endif
#if defined(FASTVIT_HAS_AVX2)
  if (isa == "avx2") return FASTVIT_KERNEL_TABLE(avx2);
#endif
#if defined(FASTVIT_HAS_BASELINE)
  if (isa == "baseline") return FASTVIT_KERNEL_TABLE(baseline);
#endif
  throw std::runtime_error("fastvit: this build has no CPU kernels for " + isa +
                           "; build it on this machine, or with FASTVIT_CPU=all");
}

// A task of a reduction sums a tile (a range of channels) over a slice (a range of rows, or of segments of
// planes). A slice has at least this many values per channel, so that its results take little memory compared
// with the values.
constexpr int64_t kMinValuesPerSlice = 1 << 8;
// A slice of rows may have fewer: the results of a task's channels lie side by side and stay in the cache, so
// they cost little.
constexpr int64_t kMinRowsPerSlice = 1 << 7;
constexpr int64_t kMaxTasks = 256;
// Planes with fewer elements are summed together with other planes of their channel.
constexpr int64_t kMinLengthSummedAlone = 512;
// In a walk of rows the channels are divided into tiles only until there are this many tasks, since reading a
// part of every row is slower than reading whole rows.
constexpr int64_t kWantedRowTasks = 8;
constexpr int64_t kMinRowTileChannels = 64;  // nominal: a tile may have half as many

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable selected = select_kernel_table();
  return selected;
}

CpuPlan plan_cpu_work(const WalkLayout& layout) {
  const int64_t span_length = layout.is_rows ? layout.channels : layout.inner;
  CpuPlan plan{};
  plan.numel = layout.numel(), plan.channels = layout.channels;
  const int64_t max_segments = std::max<int64_t>(1, ceil_div(span_length, kMaxSegmentLength));
  // Segments of equal length, rounded up to a multiple of 16, so that a segment's SIMD vectors are aligned if
  // its span is. The rounding may leave fewer segments.
  plan.segment_length =
      std::min<int64_t>(kMaxSegmentLength, ceil_div(ceil_div(span_length, max_segments), 16) * 16);
  plan.segments = std::max<int64_t>(1, ceil_div(span_length, std::max<int64_t>(plan.segment_length, 1)));
  plan.planes_at_once =
      layout.inner < kMinLengthSummedAlone ? kMaxSegmentLength / std::max<int64_t>(layout.inner, 1) : 1;
  // With rows, a unit is a row. With planes, a unit is the same segment of all channels' planes.
  plan.units = layout.is_rows ? layout.outer : layout.outer * plan.segments;
  const int64_t max_tasks = std::clamp<int64_t>(ceil_div(layout.numel(), kMinTaskElements), 1, kMaxTasks);
  const int64_t max_slices =
      layout.values_per_channel() / (layout.is_rows ? kMinRowsPerSlice : kMinValuesPerSlice);
  // Slices of parts of planes would leave gaps in what a task reads.
  plan.slice_step = !layout.is_rows && layout.outer * layout.channels >= max_tasks ? plan.segments : 1;
  plan.slices =
      std::clamp<int64_t>(std::min({plan.units / plan.slice_step, max_tasks, max_slices}), 1, kMaxSlices);
  const int64_t wanted_tasks = layout.is_rows ? std::min(max_tasks, kWantedRowTasks) : max_tasks;
  plan.tiles =
      std::clamp<int64_t>(ceil_div(wanted_tasks, plan.slices), 1, std::max<int64_t>(layout.channels, 1));
  if (layout.is_rows)  // at least plan.segments tiles, so that a tile is no longer than a segment
    plan.tiles =
        std::max(std::min(plan.tiles, ceil_div(layout.channels, kMinRowTileChannels)), plan.segments);
  return plan;
}

}  // namespace fastvit
