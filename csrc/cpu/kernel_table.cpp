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

#define FASTVIT_KERNELS_OF(capability)                                                             \
  Kernels {                                                                                        \
    #capability, capability::stats, capability::forward, capability::reduce, capability::backward, \
        capability::layer_norm_forward, capability::layer_norm_backward, capability::act           \
  }

// The best instruction set of this CPU; ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers the choice, as in
// torch.
std::string best_capability() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string most = wish ? wish : "avx512";
  unsigned eax, ebx, ecx, edx;  // older clangs do not know f16c by name
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && most == "avx512") return "avx512";
  if (avx2 && most != "default") return "avx2";
#endif
  return "baseline";
}

Kernels choose_kernels() {
  const std::string best = best_capability();
#define FASTVIT_COMPILED(capability) \
  if (best == #capability) return FASTVIT_KERNELS_OF(capability);
  FASTVIT_SETS;  // such as FASTVIT_COMPILED(avx2)
  throw std::runtime_error("fastvit: this build has no CPU kernels for " + best +
                           "; build it on this machine, or with FASTVIT_CPU=all");
}

constexpr int64_t kValuesPerPartial = 1 << 8;  // so that partial results are far smaller than the activation
constexpr int64_t kRowsPerPartial = 1 << 7;    // for rows, whose partial results stay in the cache
constexpr int64_t kMaxTasks = 256;
constexpr int64_t kLongPlane = 512;  // elements of a plane that is summed by itself
constexpr int64_t kEnoughTasks = 8;  // with fewer, rows are divided into tiles too, read less fast

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

Partition partition_of(const Layout& layout) {
  const int64_t span = layout.rows ? layout.C : layout.S;
  Partition p{};
  p.pieces = std::max<int64_t>(1, ceil_div(span, kPiece));
  p.piece = std::min<int64_t>(kPiece, ceil_div(ceil_div(span, p.pieces), 16) * 16);
  p.pieces = std::max<int64_t>(1, ceil_div(span, std::max<int64_t>(p.piece, 1)));
  p.planes = layout.S < kLongPlane ? kPiece / std::max<int64_t>(layout.S, 1) : 1;
  p.steps = layout.rows ? layout.N : layout.N * p.pieces;
  const int64_t tasks = std::clamp<int64_t>(ceil_div(layout.numel(), kTaskElements), 1, kMaxTasks);
  const int64_t partials = layout.count() / (layout.rows ? kRowsPerPartial : kValuesPerPartial);
  p.slices = std::clamp<int64_t>(std::min({p.steps, tasks, partials}), 1, kMaxSlices);
  const int64_t wanted = layout.rows ? std::min(tasks, kEnoughTasks) : tasks;
  p.tiles = std::clamp<int64_t>(ceil_div(wanted, p.slices), 1, std::max<int64_t>(layout.C, 1));
  if (layout.rows) p.tiles = std::max(std::min(p.tiles, ceil_div(layout.C, 64)), p.pieces);
  return p;
}

}  // namespace fastvit
