// Chooses the kernels of the best instruction set, and divides their work.
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

// The best instruction set of this CPU; ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers the choice, as in
// torch.
std::string best_isa() {
#if defined(__x86_64__)
  const char* requested = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string highest = requested ? requested : "avx512";
  unsigned eax, ebx, ecx, edx;  // older clangs do not know f16c by name
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && highest == "avx512") return "avx512";
  if (avx2 && highest != "default") return "avx2";
#endif
  return "baseline";
}

#define FASTVIT_KERNEL_TABLE(isa)                                                                    \
  KernelTable {                                                                                      \
    #isa, isa::bn_stats, isa::bn_forward, isa::bn_reduce, isa::bn_backward, isa::layer_norm_forward, \
        isa::layer_norm_backward, isa::act                                                           \
  }

// setup.py defines FASTVIT_HAS_* for the instruction sets that it compiles.
KernelTable select_kernel_table() {
  const std::string isa = best_isa();
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

constexpr int64_t kMinValuesPerSlice = 1 << 8;  // so that partial results are far smaller than the activation
constexpr int64_t kMinRowsPerSlice = 1 << 7;    // for rows, whose partial results stay in the cache
constexpr int64_t kMaxTasks = 256;
constexpr int64_t kMinLengthSummedAlone = 512;  // elements of a plane that is summed by itself
constexpr int64_t kEnoughTasks = 8;             // with fewer, rows are divided into tiles too, read less fast

}  // namespace

const KernelTable& kernel_table() {
  static const KernelTable selected = select_kernel_table();
  return selected;
}

CpuPlan plan_cpu_work(const WalkLayout& layout) {
  const int64_t span = layout.is_rows ? layout.channels : layout.inner;
  CpuPlan p{};
  p.segments = std::max<int64_t>(1, ceil_div(span, kMaxSegment));
  p.segment_length = std::min<int64_t>(kMaxSegment, ceil_div(ceil_div(span, p.segments), 16) * 16);
  p.segments = std::max<int64_t>(1, ceil_div(span, std::max<int64_t>(p.segment_length, 1)));
  p.planes_at_once =
      layout.inner < kMinLengthSummedAlone ? kMaxSegment / std::max<int64_t>(layout.inner, 1) : 1;
  p.units = layout.is_rows ? layout.outer : layout.outer * p.segments;
  const int64_t tasks = std::clamp<int64_t>(ceil_div(layout.numel(), kMinTaskElements), 1, kMaxTasks);
  const int64_t partials =
      layout.values_per_channel() / (layout.is_rows ? kMinRowsPerSlice : kMinValuesPerSlice);
  p.slices = std::clamp<int64_t>(std::min({p.units, tasks, partials}), 1, kMaxSlices);
  const int64_t wanted = layout.is_rows ? std::min(tasks, kEnoughTasks) : tasks;
  p.tiles = std::clamp<int64_t>(ceil_div(wanted, p.slices), 1, std::max<int64_t>(layout.channels, 1));
  if (layout.is_rows) p.tiles = std::max(std::min(p.tiles, ceil_div(layout.channels, 64)), p.segments);
  return p;
}

}  // namespace fastvit
