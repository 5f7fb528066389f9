// How an op's work is divided among blocks and threads; made on the host, for any strides. Plain C++, so that
// benchmarks/predict.py plans without CUDA.
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
#include <utility>

#include "../layout.h"
#include "threads.h"

namespace fastvit {

constexpr double kFull = 0.95;               // of lanes or blocks with work: no better division is looked for
constexpr double kBytesPerNanosecond = 32;   // of a multiprocessor, on an H200
constexpr double kLatencyNanoseconds = 800;  // of a batch under load; both weigh waves against merging
constexpr int kBatch = 4;                    // packets of each operand that a thread has in flight
constexpr int kMostTile = 256;               // channels of a block
constexpr int kSemaphores = 4096;            // tiles whose slices are merged
constexpr int64_t kSemaphoreWords = 2 * kSemaphores;
constexpr unsigned kAhead = 8;  // slices' results that a thread loads together

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

// How the slices of a tile are merged: `count` groups of `size`, or each slice is a group of its own where
// one block can merge them all as fast as it can merge a group.
struct SliceGroups {
  unsigned size, count;

  explicit SliceGroups(const Plan& plan) : size(1), count(plan.slices) {
    const unsigned teams = unsigned(kThreads / plan.tile), most = 2 * kAhead * teams;
    if (plan.slices <= most) return;
    const unsigned groups = (plan.slices + most - 1) / most;
    if (semaphores(plan, groups) <= kSemaphoreWords) size = most, count = groups;
  }
  // Words of semaphores: of each tile, of the totals that its blocks wait for, and of its groups.
  static int64_t semaphores(const Plan& plan, unsigned groups) {
    return int64_t(plan.tiles) * (2 + int64_t(groups));
  }
  int64_t semaphores(const Plan& plan) const { return semaphores(plan, size > 1 ? count : 0); }
};

// What the slowest thread does one after the other when slices are merged (block_reduce.cuh: merge_rows).
struct MergeDepth {
  int64_t loads = 0, merges = 0;  // a load is of kAhead results at once

  static MergeDepth of(const Plan& plan) {
    MergeDepth depth;
    if (plan.slices <= 1) return depth;
    const SliceGroups groups(plan);
    if (groups.size > 1) depth.add(groups.size, plan.tile);
    depth.add(groups.count, plan.tile);
    return depth;
  }
  double nanoseconds() const { return 300.0 * double(loads) + 65.0 * double(merges); }  // on an H200

 private:
  void add(int64_t rows, int tile) {
    const int64_t teams = kThreads / tile, turns = ceil_div(rows, int64_t(kAhead) * teams);
    loads += turns;
    merges += turns;
    for (int64_t left = kAhead; left > 1; left /= 2) merges += turns;
    for (int64_t left = teams; left > 1; left = (left + 1) / 2) ++merges;
  }
};

class Planner {
 public:
  // What reads `kept` operands and merges the slices of a channel stays on chip where there is room, planned
  // alike for an op and its local form, which so give the same bits. slots = 0 where there is no room.
  static Plan on_chip(const Layout& layout, const void* const* pointers, int operands, int element_size,
                      const Limits& limits, int kept) {
    Planner planner(layout, pointers, operands, element_size, limits.multiprocessors);
    Plan plan = planner.walk();
    planner.keep(plan, kept, limits.smem_cache_bytes);
    return plan;
  }
  // resident(plan): blocks that a multiprocessor holds of the kernel that walks as `plan` does.
  template <class Resident>
  static Plan make(const Layout& layout, const void* const* pointers, int operands, int element_size,
                   const Limits& limits, int kept, const Resident& resident) {
    Planner planner(layout, pointers, operands, element_size, limits.multiprocessors);
    const Plan walk = planner.walk();
    Plan plan = walk;
    if (planner.keep(plan, kept, limits.smem_cache_bytes)) return plan;
    planner.spread(plan = walk, kept, std::max(1, int(resident(walk))));
    return plan;
  }

 private:
  Planner(const Layout& layout, const void* const* pointers, int operands, int element_size,
          int multiprocessors)
      : l(layout),
        pointers(pointers),
        operands(operands),
        element_size(element_size),
        V(16 / element_size),
        multiprocessors(multiprocessors) {}

  const Layout& l;
  const void* const* pointers;
  const int operands, element_size, V, multiprocessors;
  int64_t resident = 1;  // blocks that run at once

  // Which kernel; how it is spread over blocks follows when it is known how many of them run at once.
  Plan walk() const {
    Plan plan;
    plan.layout = l;
    if (!fold(plan) && !rows(plan)) plan.vector = aligned_planes();
    return plan;
  }

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
      if (best == kThreads) break;  // all have work
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
        if (tile >= l.C || best == kThreads) break;
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

  bool aligned_planes() const {
    // Packets are cut at 16-byte boundaries, which must fall alike in all operands.
    const Strides& first = l.strides[0];
    const uintptr_t p = reinterpret_cast<uintptr_t>(pointers[0]);
    return l.outer_dims <= 1 && l.S >= 2 * V && all([&](const Strides& s, uintptr_t q) {
             return s.inner == 1 && q % 16 == p % 16 && (s.channel - first.channel) % V == 0 &&
                    (s.outer[0] - first.outer[0]) % V == 0;
           });
  }

  void planes(Plan& plan) const {
    const int width = plan.vector ? V : 1;
    plan.segment = std::min<int64_t>(l.S, int64_t(kThreads) * 4 * kBatch * width);
    const auto blocks = [&] {
      plan.segments = ceil_div(l.S, plan.segment);
      return l.C * ceil_div(l.N * plan.segments, kThreads / plan.lanes);
    };
    // As many lanes as take a unit in one to eight batches with the fewest packets that do not exist: at
    // 56x56 16-bit values 50, eight of whose batches are full, where 128 have 8 fourth packets. Even, for
    // whole sectors.
    const int64_t packets = ceil_div(plan.segment, width);
    double best = 0;
    for (int batches = 1; batches <= 8 && best < kFull; ++batches) {
      int64_t lanes = ceil_div(packets, batches * kBatch);
      if (plan.vector) lanes += lanes % 2;
      if (lanes > kThreads) continue;
      const double full = double(packets) * used(int(lanes)) / double(lanes * batches * kBatch * kThreads);
      const int before = std::exchange(plan.lanes, int(lanes));
      if (full > best + 0.02 && blocks() >= resident)
        best = full;
      else
        plan.lanes = before;
    }
    if (best > 0) {
      blocks();  // for the segments of the lanes that were chosen
      return;
    }
    while (plan.lanes < kThreads && plan.lanes * width * kBatch < plan.segment) plan.lanes *= 2;
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

  // Units that a team takes between two looks at the loop's end.
  static int64_t step(const Plan& plan) { return int64_t(plan.teams) * (plan.rows ? kBatch : 1); }

  // The slices that units are there for, and as many of them as run at once.
  struct Bounds {
    int64_t most, least;
  };
  Bounds bounds(Plan& plan, int kept) const {
    if (!plan.rows) planes(plan);
    plan.teams = kThreads / plan.lanes;
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(l.C, plan.tile)));
    plan.units = plan.rows ? l.N : l.N * plan.segments;
    const int64_t most =
        kept && plan.tiles > kSemaphores ? 1 : std::max<int64_t>(1, ceil_div(plan.units, step(plan)));
    return {most, std::min(most, std::max<int64_t>(1, resident / plan.tiles))};
  }

  // Whether the plan stays on chip, which takes one wave of blocks.
  bool keep(Plan& plan, int kept, int64_t smem_cache_bytes) {
    const int64_t packet = int64_t(kept) * kThreads * 16;
    if (packet == 0 || !plan.vector || packet > smem_cache_bytes) return false;
    resident = int64_t(multiprocessors) * kOnChipBlocks;
    plan.slices = unsigned(bounds(plan, kept).least);
    const int64_t slots = packets(plan);
    if (slots * packet <= smem_cache_bytes) plan.slots = int(slots);
    return plan.slots > 0;
  }

  // As many slices as fill one to four waves of blocks: the first that leave hardly a place idle, or else the
  // cheapest. A turn of all blocks takes as long as memory takes, or as its latency where they are few.
  void spread(Plan& plan, int kept, int blocks_per_multiprocessor) {
    resident = int64_t(multiprocessors) * blocks_per_multiprocessor;
    const auto [most, least] = bounds(plan, kept);
    const double bytes = double(l.numel()) * operands * element_size;
    const double per_nanosecond = kBytesPerNanosecond * multiprocessors;
    const double of_block =
        bytes * double(step(plan)) / double(std::max<int64_t>(1, plan.units * plan.tiles));
    const int64_t deep =
        plan.rows ? 1 : ceil_div(plan.segment, int64_t(plan.lanes) * kBatch * (plan.vector ? V : 1));
    const auto turn = [&](int64_t blocks) {
      return blocks ? std::max(kLatencyNanoseconds * double(deep), double(blocks) * of_block / per_nanosecond)
                    : 0;
    };
    double best = 0;
    for (int waves = 1; waves <= 4; ++waves) {
      const int64_t slices = std::clamp<int64_t>(waves * resident / plan.tiles, least, most);
      const int64_t blocks = plan.tiles * slices, full = blocks / resident, rest = blocks - full * resident;
      const double stream =
          double(ceil_div(plan.units, slices * step(plan))) * (double(full) * turn(resident) + turn(rest));
      const unsigned before = std::exchange(plan.slices, unsigned(slices));
      const double price = stream + (kept ? MergeDepth::of(plan).nanoseconds() : 0);
      if (best == 0 || price < 0.97 * best)
        best = price;
      else
        plan.slices = before;
      if (slices == most || stream * kFull * per_nanosecond <= bytes) break;
    }
  }
};

}  // namespace fastvit
