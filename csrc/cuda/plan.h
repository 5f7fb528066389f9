// Divides the work of an op among blocks and threads, on the host, for any strides.
//
// A block processes a tile of channels and a slice of the values of each. `lanes` threads access consecutive
// memory; `teams` such groups of threads share the units of the slice.
//   planes  a tile is one channel; a unit is a plane, or a segment of a long one.
//   rows    a unit is one row; a thread has the same columns in all rows, so the constants of its channels
//           stay in registers. Short contiguous planes are walked as rows too: all channels of one n are a
//           row of C * S columns, `fold` = S columns per channel, so that loads are 16 bytes wide at 7x7 and
//           14x14.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "../layout.h"

namespace fastvit {

constexpr int kThreads = 256;     // per block, in every kernel
constexpr int kResident = 2;      // launch bound: blocks that a multiprocessor can hold; leaves 128 registers
constexpr int kOnChipBlocks = 2;  // blocks that share a multiprocessor's shared memory in local ops
static_assert(kOnChipBlocks <= kResident);
constexpr double kFull = 0.95;               // share of busy lanes or blocks at which the search ends
constexpr double kBytesPerNanosecond = 32;   // of a multiprocessor of an H200
constexpr double kLatencyNanoseconds = 800;  // of a batch under load; both weigh waves against merging
constexpr int kBatch = 4;                    // packets of each operand that a thread has in flight
constexpr int kMostTile = 256;               // most channels of a block
constexpr int kSemaphores = 4096;            // most tiles whose slices are merged
constexpr int64_t kSemaphoreWords = 2 * kSemaphores;
constexpr int64_t kExchangeWords = 3;  // finished tiles, ended parts, failed parts: csrc/sync/cuda_peer.cuh
constexpr unsigned kAhead = 8;         // results of slices that a thread loads together

struct Limits {  // properties of a device
  int multiprocessors = 1;
  int64_t smem_cache_bytes = 0;  // shared memory of a block for packets
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
  int64_t segment = 1, segments = 1;  // length and number of segments of a plane
  int64_t units = 0;
  int slots = 0;  // packets of each operand that a thread holds in shared memory; 0: they do not fit

  int64_t blocks() const { return int64_t(tiles) * slices; }
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The merging of a tile's slices: in `count` groups of `size`. Groups of one slice where a block merges all
// slices as fast as one group.
struct SliceGroups {
  unsigned size, count;

  explicit SliceGroups(const Plan& plan) : size(1), count(plan.slices) {
    const unsigned teams = unsigned(kThreads / plan.tile), most = 2 * kAhead * teams;
    if (plan.slices <= most) return;
    const unsigned groups = (plan.slices + most - 1) / most;
    if (semaphores(plan, groups) <= kSemaphoreWords) size = most, count = groups;
  }
  // Semaphores: one per tile, one for the totals that its blocks wait for, and one per group.
  static int64_t semaphores(const Plan& plan, unsigned groups) {
    return int64_t(plan.tiles) * (2 + int64_t(groups));
  }
  int64_t semaphores(const Plan& plan) const { return semaphores(plan, size > 1 ? count : 0); }
};

// The sequential loads and merges of the slowest thread when slices are merged (block_reduce.cuh:
// merge_rows).
struct MergeDepth {
  int64_t loads = 0, merges = 0;  // a load has kAhead results

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
    const int64_t teams = std::min<int64_t>(kThreads / tile, rows),
                  turns = ceil_div(rows, int64_t(kAhead) * teams);
    loads += turns;
    merges += turns;
    for (int64_t left = kAhead; left > 1; left /= 2) merges += turns;
    for (int64_t left = teams; left > 1; left = (left + 1) / 2) ++merges;
  }
};

class Planner {
 public:
  // The plan of an op that merges slices. Where there is room, `cached` operands stay in shared memory. The
  // plan is the same for an op and its local form, so both give the same bits. slots = 0 where there is no
  // room.
  static Plan on_chip(const Layout& layout, const void* const* pointers, int operands, int element_size,
                      const Limits& limits, int cached) {
    Planner planner(layout, pointers, operands, element_size, limits.multiprocessors);
    Plan plan = planner.walk(true);
    planner.cache(plan, cached, limits.smem_cache_bytes);
    return plan;
  }
  // resident(plan): blocks per multiprocessor of the kernel with the walk of `plan`.
  template <class Resident>
  static Plan make(const Layout& layout, const void* const* pointers, int operands, int element_size,
                   const Limits& limits, int cached, const Resident& resident) {
    Planner planner(layout, pointers, operands, element_size, limits.multiprocessors);
    const Plan walk = planner.walk(cached > 0);
    Plan plan = walk;
    if (planner.cache(plan, cached, limits.smem_cache_bytes)) return plan;
    planner.spread(plan = walk, cached, std::max(1, int(resident(walk))));
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
  int64_t resident = 1;  // blocks that are resident at once on the device

  // Selects the kernel. The division into blocks follows when its number of resident blocks is known.
  Plan walk(bool merges) const {
    Plan plan;
    plan.layout = l;
    if (!fold(plan) && !rows(plan, merges)) plan.vector = aligned_planes();
    return plan;
  }

  template <class Condition>
  bool all(const Condition& condition) const {
    for (int k = 0; k < operands; ++k)
      if (!condition(l.strides[k], reinterpret_cast<uintptr_t>(pointers[k]))) return false;
    return true;
  }
  // Whether packets of V are aligned, and rows, columns and the offsets within a batch fit in 32 bits.
  bool aligned_rows(int64_t columns) const {
    return l.outer_dims <= 1 && columns % V == 0 && std::max(columns, l.N) <= INT32_MAX &&
           all([&](const Strides& s, uintptr_t p) {
             return p % 16 == 0 && s.outer[0] % V == 0 && s.outer[0] * kThreads * kBatch <= INT32_MAX;
           });
  }
  static int used(int lanes) { return kThreads / lanes * lanes; }  // threads with work

  bool rows(Plan& plan, bool merges) const {
    if (!l.rows && l.N > 0) return false;
    plan.rows = true;
    plan.columns = l.C;
    plan.vector = aligned_rows(l.C) && all([](const Strides& s, uintptr_t) { return s.channel == 1; });
    const int64_t packets = std::max<int64_t>(1, plan.vector ? l.C / V : l.C);
    // At most 32 lanes, which read 512 bytes of a row, or 16 where slices are merged: half the channels in a
    // tile are also half the slices of a channel, so the last block has a quarter of the results to merge.
    // At least 4, which read one or two whole sectors. Among these, the number that leaves the fewest threads
    // and columns without work.
    double best = 0;
    for (int lanes = int(std::min<int64_t>(packets, merges ? 16 : 32));
         lanes >= std::min<int64_t>(packets, 4); --lanes) {
      const double score = double(packets) * used(lanes) / double(ceil_div(packets, lanes) * lanes);
      if (score > best) best = score, plan.lanes = lanes;
      if (best == kThreads) break;  // no thread is idle
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
    // Packets begin at 16-byte boundaries, which must be at the same elements of all operands.
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
    // The number of lanes with which one to eight batches cover a unit with the fewest empty packets, and one
    // wave of blocks all units with the fewest idle teams. 50 for 56x56 values of 16 bits, whose eight
    // batches are nearly full; with 128 most fourth packets are empty. 56 for 128 images of 112x112 values,
    // whose four teams have four images each; of five teams of 50 lanes, one would have a fourth. Even, for
    // whole sectors, and at least 16, which read 256 bytes in a row.
    const int64_t packets = ceil_div(plan.segment, width);
    const auto evenness = [&](int64_t lanes) {
      const int64_t units = l.N * ceil_div(l.S, plan.segment), teams = kThreads / lanes;
      const int64_t at_once = teams * std::clamp<int64_t>(resident / std::max<int64_t>(1, l.C), 1,
                                                          std::max<int64_t>(1, ceil_div(units, teams)));
      return double(units) / double(std::max<int64_t>(1, ceil_div(units, at_once)) * at_once);
    };
    double best = 0;
    for (int batches = 1; batches <= 8 && best < kFull; ++batches) {
      int64_t lanes = ceil_div(packets, batches * kBatch);
      if (plan.vector) lanes += lanes % 2;
      if (lanes > kThreads || (best > 0 && lanes < 16)) continue;
      const double full =
          double(packets) * used(int(lanes)) / double(lanes * batches * kBatch * kThreads) * evenness(lanes);
      const int before = std::exchange(plan.lanes, int(lanes));
      if (full > best + 0.02 && blocks() >= resident)
        best = full;
      else
        plan.lanes = before;
    }
    if (best > 0) {
      blocks();  // for the segments of the chosen lanes
      return;
    }
    while (plan.lanes < kThreads && plan.lanes * width * kBatch < plan.segment) plan.lanes *= 2;
    // With too few blocks: fewer packets in flight per thread, then shorter segments, down to one packet.
    while (blocks() < resident && plan.segment > int64_t(plan.lanes) * width) {
      if (plan.lanes < kThreads)
        plan.lanes *= 2;
      else
        plan.segment = ceil_div(ceil_div(l.S, 2 * plan.segments), width) * width;
    }
  }

  // The most packets of an operand in a thread's walk, empty ones included.
  int64_t packets(const Plan& plan) const {
    if (plan.rows) return ceil_div(plan.units, int64_t(plan.slices) * plan.teams * kBatch) * kBatch;
    const bool ends = !all([&](const Strides& s, uintptr_t p) {
      return p % 16 == 0 && s.channel % V == 0 && s.outer[0] % V == 0 && l.S % V == 0;
    });
    const int64_t whole = ceil_div(ceil_div(plan.segment, V), int64_t(plan.lanes) * kBatch) * kBatch,
                  single = ends ? ceil_div(2 * (V - 1), plan.lanes) : 0;
    return ceil_div(plan.units, int64_t(plan.slices) * plan.teams) * (whole + single);
  }

  // Units of a team per iteration of the loop.
  static int64_t step(const Plan& plan) { return int64_t(plan.teams) * (plan.rows ? kBatch : 1); }

  // The most slices: one per unit, and no more than are resident at once.
  struct Bounds {
    int64_t most, least;
  };
  Bounds bounds(Plan& plan, int cached) const {
    if (!plan.rows) planes(plan);
    plan.teams = kThreads / plan.lanes;
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(l.C, plan.tile)));
    plan.units = plan.rows ? l.N : l.N * plan.segments;
    const int64_t most =
        cached && plan.tiles > kSemaphores ? 1 : std::max<int64_t>(1, ceil_div(plan.units, step(plan)));
    return {most, std::min(most, std::max<int64_t>(1, resident / plan.tiles))};
  }

  // Whether the plan stays on chip, in one wave of blocks.
  bool cache(Plan& plan, int cached, int64_t smem_cache_bytes) {
    const int64_t packet = int64_t(cached) * kThreads * 16;
    if (packet == 0 || !plan.vector || packet > smem_cache_bytes) return false;
    resident = int64_t(multiprocessors) * kOnChipBlocks;
    plan.slices = unsigned(bounds(plan, cached).least);
    const int64_t slots = packets(plan);
    if (slots * packet <= smem_cache_bytes) plan.slots = int(slots);
    return plan.slots > 0;
  }

  // The number of slices that fills one to four waves of blocks: the first with at least kFull of the places
  // busy, else the cheapest. A wave takes the time of its memory traffic, or the latency if that is longer.
  void spread(Plan& plan, int cached, int blocks_per_multiprocessor) {
    resident = int64_t(multiprocessors) * blocks_per_multiprocessor;
    const auto [most, least] = bounds(plan, cached);
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
      const double price = stream + (cached ? MergeDepth::of(plan).nanoseconds() : 0);
      if (best == 0 || price < 0.97 * best)
        best = price;
      else
        plan.slices = before;
      if (slices == most || stream * kFull * per_nanosecond <= bytes) break;
    }
  }
};

}  // namespace fastvit
