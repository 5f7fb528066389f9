// csrc/cuda/plan.h and row_plan.h for planner.py: the plans that the CUDA launchers make.
#include "cuda/plan.h"
#include "cuda/row_plan.h"

using namespace fastvit;

struct Request {
  int64_t dims, sizes[kMaxDims], strides[kMaxDims], channel_dim;
  int64_t operands, element_size, cached, multiprocessors, smem_cache_bytes;
  int64_t resident[2][2];  // blocks of a multiprocessor, by rows and by packets
};

// Answers the words of planner.py.
extern "C" void fastvit_plan(const Request* request, int64_t* answer) {
  const Request& r = *request;
  Operand operands[kMaxOperands];
  const void* pointers[kMaxOperands];
  for (Operand& operand : operands) operand.strides = r.strides;
  for (const void*& p : pointers) p = reinterpret_cast<const void*>(uintptr_t(1) << 20);
  const Layout layout = make_layout(int(r.dims), r.sizes, int(r.channel_dim), int(r.operands), operands);
  const Limits limits{int(r.multiprocessors), r.smem_cache_bytes};
  const Plan p = Planner::make(layout, pointers, int(r.operands), int(r.element_size), limits, int(r.cached),
                               [&](const Plan& plan) { return int(r.resident[plan.rows][plan.vector]); });
  const bool merges = r.cached > 0;
  const MergeDepth depth = merges ? MergeDepth::of(p) : MergeDepth{};
  const int64_t levels = merges && p.slices > 1 ? 1 + (SliceGroups(p).size > 1) : 0;
  const int64_t resident = p.slots ? kOnChipBlocks : r.resident[p.rows][p.vector];
  for (const int64_t word : {int64_t(p.rows), int64_t(p.vector), int64_t(p.lanes), int64_t(p.teams),
                             int64_t(p.fold), p.blocks(), int64_t(p.slices), p.segment, p.units,
                             int64_t(p.slots), resident, levels, int64_t(depth.nanoseconds())})
    *answer++ = word;
}

// request: rows, columns, the width of a packet, whether backward, whether of __half. Rows are of float32 or
// 16-bit numbers, 4 or 8 in a packet. Answers lanes, parts, packets of a lane.
extern "C" void fastvit_row_plan(const int64_t* request, int64_t* answer) {
  const auto& [rows, columns, width, backward, half] = *reinterpret_cast<const int64_t(*)[5]>(request);
  // layer_norm_backward.cu: of __half as of float
  const auto& of_backward = width == 8 && !half ? kBackwardColumns<uint16_t> : kBackwardColumns<float>;
  const auto& choices = backward ? of_backward : kForwardColumns;
  const RowPlan plan =
      width == 8 ? row_plan<float, 8>(rows, columns, choices) : row_plan<float, 4>(rows, columns, choices);
  answer[0] = plan.lanes, answer[1] = plan.parts, answer[2] = plan.held / width;
}
