// Divides the work of an op among blocks and threads, on the host, for any strides.
//
// A block processes a tile of channels and a slice of the values of each. `lanes` threads access consecutive
// memory; `teams` such groups of threads share the units of the slice.
//   planes  a tile is one channel; a unit is a plane, or a segment of a long one.
//   rows    a unit is one row; a thread has the same columns in all rows, so the constants of its channels
//           stay in registers. Short contiguous planes are walked as rows too: all channels of one n are a
//           row of C * S columns, `fold` = S columns per channel, so that loads are 16 bytes wide at 7x7 and
//           14x14.
// The planner prefers the division in which the most vectors of all resident threads hold data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../walk_layout.h"

namespace fastvit {

constexpr int kThreads = 256;  // per block, in every kernel
constexpr int kResident = 2;   // launch bound: blocks that a multiprocessor can hold; leaves 128 registers
constexpr int kBatch = 4;      // vectors of each operand that a thread has in flight
constexpr int kSemaphores = 4096;     // most tiles whose slices are merged: 32 KiB of a stream's memory
constexpr int kLanes = 32;            // most lanes of rows, which read 512 bytes
constexpr int kMaxTile = 8 * kLanes;  // channels of a block, each merged by a thread: vectors of 16 bits
constexpr int kMergedLanes = 16;      // half where slices are merged: a channel then has half as many
constexpr int kMinLanes = 4;          // least lanes of rows: one or two whole sectors of memory
constexpr int kLineVectors = 8;       // vectors in a line of 128 bytes
constexpr int kFolded = 64;           // most vectors of a plane that is walked as a part of a row
constexpr int kBatches = 4;           // most batches of a thread in a segment, at kThreads lanes
constexpr int kWaves = 4;       // most waves that are tried: a later one is less than a fifth of the work
constexpr double kFull = 0.95;  // a search ends at this fraction of vectors with data
constexpr double kGain = 0.02;  // least gain of it for which other lanes or a further wave are chosen
constexpr double kMergedGain = 0.1;  // the same where a further wave adds slices to merge

struct Limits {  // properties of a device
  int multiprocessors = 1;
  int on_chip_blocks = kResident;  // which share a multiprocessor's shared memory in on-chip ops
  int64_t smem_cache_bytes = 0;    // shared memory of each of these for vectors
};

struct Plan {
  Layout layout;
  bool rows = false;
  bool vector = false;  // vectors of 16 bytes; otherwise of one element
  int lanes = 1, teams = 1;
  int fold = 1;  // columns of a row per channel
  int tile = 1;  // channels of a block
  unsigned tiles = 1, slices = 1;
  int64_t columns = 1;
  int64_t segment = 1, segments = 1;  // length and number of segments of a plane
  int64_t units = 0;
  int cached_vectors = 0;  // of each operand, in shared memory by a thread; 0: they do not fit

  int64_t blocks() const { return int64_t(tiles) * slices; }
};

struct Planner {
  const Layout& l;
  const void* const* pointers;
  int operands, element_size;
  const Limits& limits;
  int merged_operands;  // read by an op that merges slices, on chip where they fit; 0: the op merges none
  int least_waves = 1;  // of blocks; several balance the ends of a kernel whose blocks begin with little work
  int V = 16 / element_size;

  // For an op whose merged operands stay in shared memory; cached_vectors = 0 where they do not fit.
  Plan on_chip() const {
    Plan plan = kernel();
    const int64_t bytes = int64_t(merged_operands) * kThreads * 16;  // one vector per thread and operand
    if (bytes == 0 || !plan.vector || bytes > limits.smem_cache_bytes) return plan;
    divide(plan, int64_t(limits.multiprocessors) * limits.on_chip_blocks, 1);
    const int64_t vectors = walked(plan);
    plan.cached_vectors = vectors * bytes <= limits.smem_cache_bytes ? int(vectors) : 0;
    return plan;
  }
  // The plan of a kernel. Where the operands fit on chip it equals on_chip(), so an op and its on-chip form
  // give the same bits. resident(plan) is the number of blocks per multiprocessor of the kernel with the walk
  // of `plan`.
  Plan plan(const auto& resident) const {
    Plan plan = on_chip();
    if (plan.cached_vectors == 0)
      divide(plan, int64_t(limits.multiprocessors) * std::max(1, int(resident(plan))), kWaves);
    return plan;
  }

  bool all(const auto& condition) const {
    for (int k = 0; k < operands; ++k)
      if (!condition(l.strides[k], reinterpret_cast<uintptr_t>(pointers[k]))) return false;
    return true;
  }
  // Selects the kernel, and the lanes and tile of rows.
  Plan kernel() const {
    Plan plan;
    plan.layout = l;
    const bool as_rows = l.rows || l.N == 0;
    const int64_t fold = as_rows ? 1 : l.S;
    const bool dense =
        all([&](const Strides& s, uintptr_t) { return s.channel == fold && (as_rows || s.inner == 1); });
    const bool folded = dense && l.C > 1 && l.S <= kFolded * V;
    if ((as_rows || folded) && ((dense && rows(plan, fold, V)) || rows(plan, fold, 1))) return plan;
    // Vectors begin at 16-byte boundaries, which must be at the same elements of all operands.
    const Strides& first = l.strides[0];
    const uintptr_t p = reinterpret_cast<uintptr_t>(pointers[0]);
    plan.vector = l.outer_dims <= 1 && l.S >= 2 * V && all([&](const Strides& s, uintptr_t q) {
                    return s.inner == 1 && q % 16 == p % 16 && (s.channel - first.channel) % V == 0 &&
                           (s.outer[0] - first.outer[0]) % V == 0;
                  });
    return plan;
  }

  // Rows in vectors of `width`, if these are aligned and offsets within a batch fit in 32 bits. Takes the
  // lanes, for whole channels, that leave the fewest threads and columns without work.
  bool rows(Plan& plan, int64_t fold, int64_t width) const {
    const int64_t columns = l.C * fold, vectors = std::max<int64_t>(1, columns / width),
                  channels = width / std::gcd(width, fold), step = channels * fold / width;
    const auto fits = [&](const Strides& s, uintptr_t p) {
      return p % 16 == 0 && s.outer[0] % width == 0 && s.outer[0] * kThreads * kBatch <= INT32_MAX;
    };
    const bool packed = l.outer_dims <= 1 && columns % width == 0 && std::max(columns, l.N) <= INT32_MAX;
    if (step > kThreads || (width > 1 && !(packed && all(fits)))) return false;
    plan.rows = true, plan.vector = width > 1, plan.fold = int(fold), plan.columns = columns;
    const int64_t most = std::min<int64_t>(vectors, merged_operands ? kMergedLanes : kLanes) / step;
    double best = 0;
    for (int64_t n = std::max<int64_t>(1, most); n && (!best || n * step >= kMinLanes); --n) {
      const int64_t lanes = n * step, used = kThreads / lanes * lanes;  // threads with work
      const double found = double(vectors * used) / double(ceil_div(vectors, lanes) * lanes);
      if (found > best) best = found, plan.lanes = int(lanes), plan.tile = int(n * channels);
      if (best == kThreads) break;
    }
    return true;
  }

  int width(const Plan& plan) const { return plan.vector ? V : 1; }

  // The vectors of each operand in a thread's walk, empty ones included.
  int64_t walked(const Plan& plan) const {
    const int64_t teams = int64_t(plan.slices) * plan.teams;
    if (plan.rows) return ceil_div(plan.units, teams * kBatch) * kBatch;
    const auto whole = [&](const Strides& s, uintptr_t p) {
      return p % 16 == 0 && s.channel % V == 0 && s.outer[0] % V == 0 && l.S % V == 0;
    };
    const int64_t batches = ceil_div(ceil_div(plan.segment, width(plan)), int64_t(plan.lanes) * kBatch),
                  ends = plan.vector && !all(whole) ? ceil_div(2 * (V - 1), plan.lanes) : 0;
    return ceil_div(plan.units, teams) * (batches * kBatch + ends);
  }

  // The fraction of the vectors of all waves of blocks that hold data.
  double fraction(const Plan& plan, int64_t resident) const {
    const int64_t vectors = ceil_div(plan.blocks(), resident) * resident * kThreads * walked(plan);
    return double(l.numel()) / std::max(1.0, double(vectors) * width(plan));
  }

  // Slices for so many waves of blocks; at most one per iteration of a team's loop.
  void slice(Plan& plan, int64_t resident, int waves) const {
    plan.teams = kThreads / plan.lanes;
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(l.C, plan.tile)));
    plan.units = plan.rows ? l.N : l.N * plan.segments;
    const int64_t step = int64_t(plan.teams) * (plan.rows ? kBatch : 1), most = ceil_div(plan.units, step);
    const bool one = most == 0 || (merged_operands && plan.tiles > kSemaphores);
    plan.slices = one ? 1 : unsigned(std::clamp<int64_t>(waves * resident / plan.tiles, 1, most));
  }

  // Chooses the lanes that walk a plane so that batches, turns and blocks are fullest. For 28x28 values of 16
  // bits, 98 vectors, 32 lanes nearly fill a batch; 256 lanes leave three of its four vectors empty. A team's
  // accesses are whole lines of memory, kLineVectors, since lines that two warps write apart take longer. At
  // least 16 lanes with several batches. Segments are shorter where planes are fewer than resident blocks.
  void lanes(Plan& plan, int64_t resident) const {
    const int64_t whole = ceil_div(l.S, width(plan)),
                  few = std::min(whole / kThreads, resident / std::max<int64_t>(1, l.N * l.C)),
                  vectors = ceil_div(whole, std::max(ceil_div(whole, kThreads * kBatch * kBatches), few));
    plan.segment = vectors * width(plan), plan.segments = ceil_div(l.S, plan.segment);
    double best = 0;
    int chosen = kThreads;
    for (int batches = 0; batches <= 2 * kBatches && best < kFull; ++batches) {
      const int64_t least = batches ? ceil_div(vectors, batches * kBatch) : kThreads;
      if (least > kThreads || (batches > 1 && least < 16)) continue;
      plan.lanes = int(plan.vector ? ceil_div(least, kLineVectors) * kLineVectors : least);
      slice(plan, resident, 1);
      const double found = fraction(plan, resident);
      if (found > best + kGain) best = found, chosen = plan.lanes;
    }
    plan.lanes = chosen;
  }

  // Divides the values among blocks, of which `resident` run at once.
  void divide(Plan& plan, int64_t resident, int most_waves) const {
    if (!plan.rows) lanes(plan, resident);
    double best = 0;
    int chosen = least_waves;
    for (int waves = least_waves; waves <= most_waves && best < kFull; ++waves) {
      slice(plan, resident, waves);
      const double found = fraction(plan, resident);
      if (found > best + (merged_operands ? kMergedGain : kGain)) best = found, chosen = waves;
    }
    slice(plan, resident, chosen);
  }
};

}  // namespace fastvit
