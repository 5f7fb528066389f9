// How an op's work is divided among blocks and threads; made on the host, for any strides.
//
// A block takes a tile of channels and a slice of the values of each; `lanes` threads stand side by side
// along memory, `teams` such groups take turns over the units of the slice.
//   planes  a tile is one channel; a unit is a plane, or a segment of a long one.
//   rows    a unit is one row; a thread keeps to the same columns throughout, so what belongs to its
//           channels stays in registers. Short contiguous planes are rows too: all channels of one n make a
//           row of C * S columns, `fold` = S columns to a channel, so that loads stay wide at 7x7 and 14x14.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../layout.h"
#include "launch.cuh"

namespace fastvit {

constexpr int kBatch = 4;          // packets of each operand that a thread has in flight
constexpr int kMostTile = 256;     // channels of a block
constexpr int kSemaphores = 4096;  // tiles whose slices are merged

struct Limits {  // of a device
  int multiprocessors = 1;
  int64_t smem_cache_bytes = 0;  // of shared memory that a block may fill with packets
};

struct Plan {
  Layout layout;
  bool rows = false;
  bool vector = false;  // packets of 16 bytes; otherwise of one element
  int lanes = 1, teams = 1;
  int fold = 1;  // columns of a row per channel
  int tile = 1;  // channels of a block
  unsigned tiles = 1, slices = 1;
  int64_t columns = 1;
  int64_t segment = 1, segments = 1;  // of a plane
  int64_t units = 0;
  int slots = 0;  // packets of each operand that a thread keeps on chip; 0: they do not fit

  int64_t blocks() const { return int64_t(tiles) * slices; }
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

class Planner {
 public:
  // `kept` is for ops that merge the slices of a channel: how many operands they read, which are kept on chip
  // where there is room. An op and its local form plan alike, so they merge alike and give the same bits.
  static Plan make(const Layout& layout, const void* const* pointers, int operands, int element_size,
                   const Limits& limits, int kept = 0) {
    const Planner planner(layout, pointers, operands, element_size,
                          int64_t(limits.multiprocessors) * kResident);
    Plan plan;
    plan.layout = layout;
    if (!planner.fold(plan) && !planner.rows(plan)) planner.planes(plan);
    planner.slice(plan, kept, limits.smem_cache_bytes);
    return plan;
  }

 private:
  Planner(const Layout& layout, const void* const* pointers, int operands, int element_size, int64_t resident)
      : l(layout),
        pointers(pointers),
        operands(operands),
        element_size(element_size),
        V(16 / element_size),
        resident(resident) {}

  const Layout& l;
  const void* const* pointers;
  const int operands, element_size, V;
  const int64_t resident;  // blocks that run at once

  template <class Condition>
  bool all(const Condition& condition) const {
    for (int k = 0; k < operands; ++k)
      if (!condition(l.strides[k], reinterpret_cast<uintptr_t>(pointers[k]))) return false;
    return true;
  }
  bool aligned_rows(int64_t columns) const {  // and so near each other that a batch of them spans 32 bits
    return l.outer_dims <= 1 && columns % V == 0 && all([&](const Strides& s, uintptr_t p) {
             return p % 16 == 0 && s.outer[0] % V == 0 && s.outer[0] * kThreads * kBatch <= INT32_MAX;
           });
  }
  static int used(int lanes) { return kThreads / lanes * lanes; }  // threads that find work

  bool rows(Plan& plan) const {
    if (!l.rows && l.N > 0) return false;
    plan.rows = true;
    plan.columns = l.C;
    plan.vector = aligned_rows(l.C) && all([](const Strides& s, uintptr_t) { return s.channel == 1; });
    const int64_t packets = std::max<int64_t>(1, plan.vector ? l.C / V : l.C);
    // At most 32 lanes keeps the last block's share of the merging small; 4 are the least that read a sector
    // or two in full. Among them, those that leave the fewest threads and columns without work.
    double best = 0;
    for (int lanes = int(std::min<int64_t>(packets, 32)); lanes >= std::min<int64_t>(packets, 4); --lanes) {
      const double score = double(packets) * used(lanes) / double(ceil_div(packets, lanes) * lanes);
      if (score > best) best = score, plan.lanes = lanes;
    }
    plan.tile = plan.lanes * (plan.vector ? V : 1);
    return true;
  }

  bool fold(Plan& plan) const {
    if (l.rows || l.N == 0 || l.C == 1 || l.S > 64 * V) return false;
    if (!all([&](const Strides& s, uintptr_t) { return s.inner == 1 && s.channel == l.S; })) return false;
    for (const bool vector : {true, false}) {
      if (vector && !aligned_rows(l.C * l.S)) continue;
      const int64_t width = vector ? V : 1, step = width / std::gcd(width, l.S);
      int best = 0;
      for (int64_t tile = step; tile * l.S / width <= kThreads && tile <= kMostTile; tile += step) {
        const int lanes = int(tile * l.S / width);
        if (used(lanes) > best) best = used(lanes), plan.tile = int(tile), plan.lanes = lanes;
        if (tile >= l.C) break;
      }
      if (best == 0) continue;
      plan.rows = true;
      plan.vector = vector;
      plan.fold = int(l.S);
      plan.columns = l.C * l.S;
      return true;
    }
    return false;
  }

  void planes(Plan& plan) const {
    const Strides& first = l.strides[0];
    const uintptr_t p = reinterpret_cast<uintptr_t>(pointers[0]);
    // Packets are cut at 16-byte boundaries, which must fall alike in all operands.
    plan.vector = l.outer_dims <= 1 && l.S >= 2 * V && all([&](const Strides& s, uintptr_t q) {
                    return s.inner == 1 && q % 16 == p % 16 && (s.channel - first.channel) % V == 0 &&
                           (s.outer[0] - first.outer[0]) % V == 0;
                  });
    const int width = plan.vector ? V : 1;
    plan.segment = std::min<int64_t>(l.S, int64_t(kThreads) * 4 * kBatch * width);
    while (plan.lanes < kThreads && plan.lanes * width * kBatch < plan.segment) plan.lanes *= 2;
    const auto blocks = [&] {
      plan.segments = ceil_div(l.S, plan.segment);
      return l.C * ceil_div(l.N * plan.segments, kThreads / plan.lanes);
    };
    // Too few blocks: fewer packets in flight per thread, then shorter segments, down to one packet each.
    while (blocks() < resident && plan.segment > int64_t(plan.lanes) * width) {
      if (plan.lanes < kThreads)
        plan.lanes *= 2;
      else
        plan.segment = ceil_div(ceil_div(l.S, 2 * plan.segments), width) * width;
    }
  }

  // Packets of an operand that a thread meets at most, whether they exist or not.
  int64_t packets(const Plan& plan) const {
    if (plan.rows) return ceil_div(plan.units, int64_t(plan.slices) * plan.teams * kBatch) * kBatch;
    const bool ends = !all([&](const Strides& s, uintptr_t p) {
      return p % 16 == 0 && s.channel % V == 0 && s.outer[0] % V == 0 && l.S % V == 0;
    });
    const int64_t whole = ceil_div(ceil_div(plan.segment, V), int64_t(plan.lanes) * kBatch) * kBatch,
                  single = ends ? ceil_div(2 * (V - 1), plan.lanes) : 0;
    return ceil_div(plan.units, int64_t(plan.slices) * plan.teams) * (whole + single);
  }

  // What stays on chip takes one wave of blocks. Otherwise a few slices more than fill the device, if that
  // leaves fewer places idle in the last wave.
  void slice(Plan& plan, int kept, int64_t smem_cache_bytes) const {
    plan.teams = kThreads / plan.lanes;
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(l.C, plan.tile)));
    plan.units = plan.rows ? l.N : l.N * plan.segments;
    const int64_t most =
        kept && plan.tiles > kSemaphores
            ? 1
            : std::max<int64_t>(1, ceil_div(plan.units, plan.teams * (plan.rows ? kBatch : 1)));
    const int64_t least = std::min(most, std::max<int64_t>(1, resident / plan.tiles));
    plan.slices = unsigned(least);
    if (kept && plan.vector) {
      const int64_t slots = packets(plan);
      if (slots > 0 && slots * kept * kThreads * 16 <= smem_cache_bytes) {
        plan.slots = int(slots);
        return;
      }
    }
    double best = 0;
    for (int64_t slices = least; slices <= std::min(most, 4 * least); ++slices) {
      const int64_t blocks = plan.tiles * slices;
      const double busy = double(blocks) / double(ceil_div(blocks, resident) * resident);
      if (busy > best + 0.03) best = busy, plan.slices = unsigned(slices);
    }
  }
};

}  // namespace fastvit
