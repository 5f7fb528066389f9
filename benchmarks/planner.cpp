// csrc/cuda/plan.h and row_plan.h for benchmarks/planner.py: the plans that the CUDA launchers make, and what
// one costs the host.
#include "cuda/plan.h"

#include "cuda/row_plan.h"

#include <chrono>

using namespace fastvit;

struct Request {
  int64_t dims, sizes[kMaxDims], strides[kMaxDims], channel_dim;
  int64_t operands, element_size, cached, multiprocessors, smem_cache_bytes;
  int64_t resident[2][2];  // blocks of a multiprocessor, by rows and by packets
};

struct Answer {
  int64_t rows, vector, lanes, teams, fold, tile, tiles, slices, segment, segments, units, slots, resident;
  int64_t dependent_loads, dependent_merges, levels;
  double tail_nanoseconds;
};

static Plan plan_of(const Request& r, const Layout& layout) {
  const void* pointers[kMaxOperands];
  for (const void*& p : pointers) p = reinterpret_cast<const void*>(uintptr_t(1) << 20);
  const Limits limits{int(r.multiprocessors), r.smem_cache_bytes};
  return Planner::make(layout, pointers, int(r.operands), int(r.element_size), limits, int(r.cached),
                       [&](const Plan& plan) { return int(r.resident[plan.rows][plan.vector]); });
}

static Layout layout_of(const Request& r) {
  Operand operands[kMaxOperands];
  for (Operand& operand : operands) operand.strides = r.strides;
  return make_layout(int(r.dims), r.sizes, int(r.channel_dim), int(r.operands), operands);
}

extern "C" void fastvit_plan(const Request* request, Answer* answer) {
  const Plan p = plan_of(*request, layout_of(*request));
  const bool merges = request->cached > 0;
  const MergeDepth depth = merges ? MergeDepth::of(p) : MergeDepth{};
  const int64_t levels = merges && p.slices > 1 ? 1 + (SliceGroups(p).size > 1) : 0;
  const int64_t resident = p.slots ? kOnChipBlocks : request->resident[p.rows][p.vector];
  *answer = {p.rows,
             p.vector,
             p.lanes,
             p.teams,
             p.fold,
             p.tile,
             p.tiles,
             p.slices,
             p.segment,
             p.segments,
             p.units,
             p.slots,
             resident,
             depth.loads,
             depth.merges,
             levels,
             depth.nanoseconds()};
}

extern "C" double fastvit_plan_nanoseconds(const Request* request, int64_t repeats) {
  using Clock = std::chrono::steady_clock;
  int64_t blocks = 0;
  const auto begin = Clock::now();
  for (int64_t i = 0; i < repeats; ++i) {
    const Layout layout = layout_of(*request);
    const Plan plan = plan_of(*request, layout);
    blocks += plan.blocks();
    asm volatile("" : : "r"(&plan), "r"(blocks) : "memory");
  }
  const double taken = std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
  return taken / double(repeats);
}

// Of rows in packets of `width` float32 or 16-bit numbers, 4 or 8. Answers lanes, parts, packets of a lane.
extern "C" void fastvit_row_plan(int64_t rows, int64_t columns, int64_t width, int64_t backward,
                                 int64_t* answer) {
  const auto& of_backward = width == 8 ? kBackwardColumns<uint16_t> : kBackwardColumns<float>;
  const auto& choices = backward ? of_backward : kForwardColumns;
  const RowPlan plan =
      width == 8 ? row_plan<float, 8>(rows, columns, choices) : row_plan<float, 4>(rows, columns, choices);
  answer[0] = plan.lanes, answer[1] = plan.parts, answer[2] = plan.held / width;
}

extern "C" void fastvit_plan_constants(int64_t* threads, int64_t* batch, int64_t* on_chip_blocks) {
  *threads = kThreads, *batch = kBatch, *on_chip_blocks = kOnChipBlocks;
}
