// Divides the work of an op among blocks and threads. Runs on the host, for tensors of any strides.
//
// A block takes a tile (some channels) and a slice (a share of the values of these channels). Its threads form
// teams: the members of a team read consecutive memory, and the teams share the units of the slice.
//   planes  A tile is one channel. A unit is a plane, or a segment of a long plane.
//   rows    A unit is one row. A member has the same columns in every row, so the constants of its channels
//           stay in registers.
//   folded  Short contiguous planes, such as 7x7 and 14x14, are walked as rows of C * inner columns, so that
//           loads are 16 bytes wide. A channel then has columns_per_channel = inner columns.
// The planner chooses the division in which the largest fraction of the threads' vectors holds data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../walk_layout.h"

namespace fastvit {

constexpr int kThreads = 256;                // threads of a block, in every kernel
constexpr int kBlocksPerMultiprocessor = 2;  // launch bound; leaves 128 registers for a thread
constexpr int kBatch = 4;                    // vectors of each operand that a thread has in flight
constexpr int kMaxMergedTiles = 4096;  // an op with more tiles has one slice; bounds a stream's counters

// Team sizes of rows.
constexpr int kMaxTeam = 32;            // reads 512 bytes of a row
constexpr int kMaxMergingTeam = 16;     // of an op that merges slices: fewer channels have more slices
constexpr int kMinTeam = 4;             // reads one or two sectors of 32 bytes
constexpr int kMaxTile = 8 * kMaxTeam;  // channels: a vector of 16 bytes holds at most 8 elements
constexpr int kMaxFoldedVectors = 64;   // longest plane, in vectors, that is walked as a part of a row

// Team sizes and segments of planes.
constexpr int kVectorsPerLine = 8;        // a line of 128 bytes
constexpr int kMaxBatchesPerSegment = 4;  // of a team of kThreads
constexpr int kMinTeamOfSeveralBatches = 16;

// The search for the best division. A fraction is that of the threads' vectors that hold data.
constexpr double kFullEnough = 0.95;     // the search ends at this fraction
constexpr double kMinGain = 0.02;        // smallest gain for which a later candidate is chosen
constexpr double kMinGainMerging = 0.1;  // the same, if the candidate has more slices to merge
constexpr int kMaxWaves = 4;             // of blocks; a fifth would hold less than a fifth of the work

struct DeviceLimits {
  int multiprocessors = 1;
  int single_launch_blocks = kBlocksPerMultiprocessor;  // blocks of a single launch on a multiprocessor
  int64_t smem_cache_bytes = 0;  // shared memory in which a block of a single launch keeps vectors
};

struct LaunchPlan {
  WalkLayout layout;
  bool is_rows = false;
  bool is_vectorized = false;  // a vector has 16 bytes; otherwise one element
  int team_size = 1, teams = 1;
  int columns_per_channel = 1;  // of a row
  int tile_channels = 1;
  unsigned tiles = 1, slices = 1;
  int64_t columns = 1;                       // of a row
  int64_t segment_length = 1, segments = 1;  // of a plane
  int64_t units = 0;                         // of all slices
  int vectors_in_shared = 0;  // of each merged operand and thread; 0: a single launch is not possible

  int64_t blocks() const { return int64_t(tiles) * slices; }
};

struct LaunchPlanner {
  const WalkLayout& layout;
  const void* const* pointers;  // of the operands, in the order of layout.strides
  int operands, element_size;
  const DeviceLimits& limits;
  int merged_operands;  // operands that a reduction reads, whose slices are merged; 0: no reduction
  int min_waves = 1;    // several waves balance the blocks' ends where a block begins with little work
  int vector_width = 16 / element_size;

  // The plan of a single launch, whose blocks keep their values of the merged operands in shared memory.
  // vectors_in_shared is 0 if these do not fit.
  LaunchPlan plan_single_launch() const {
    LaunchPlan plan = choose_walk();
    const int64_t bytes_per_vector = int64_t(merged_operands) * kThreads * 16;  // one of each thread
    if (bytes_per_vector == 0 || !plan.is_vectorized || bytes_per_vector > limits.smem_cache_bytes)
      return plan;
    choose_slices(plan, int64_t(limits.multiprocessors) * limits.single_launch_blocks, 1);
    const int64_t vectors = vectors_per_thread(plan);
    plan.vectors_in_shared = vectors * bytes_per_vector <= limits.smem_cache_bytes ? int(vectors) : 0;
    return plan;
  }

  // The plan of an op in launches of its own. It equals plan_single_launch() if a single launch is possible, so
  // that both ways give the same bits. resident(plan) is the number of blocks on a multiprocessor of the kernel
  // that walks by `plan`.
  LaunchPlan plan(const auto& resident) const {
    LaunchPlan plan = plan_single_launch();
    if (plan.vectors_in_shared == 0)
      choose_slices(plan, int64_t(limits.multiprocessors) * std::max(1, int(resident(plan))), kMaxWaves);
    return plan;
  }

 private:
  bool all_operands(const auto& condition) const {
    for (int k = 0; k < operands; ++k)
      if (!condition(layout.strides[k], reinterpret_cast<uintptr_t>(pointers[k]))) return false;
    return true;
  }

  // Chooses between rows, with their team and tile, and planes; and whether vectors have 16 bytes.
  LaunchPlan choose_walk() const {
    LaunchPlan plan;
    plan.layout = layout;
    const bool is_rows = layout.is_rows || layout.outer == 0;
    const int64_t columns_per_channel = is_rows ? 1 : layout.inner;
    const bool is_dense = all_operands([&](const Strides& s, uintptr_t) {
      return s.channel == columns_per_channel && (is_rows || s.inner == 1);
    });
    const bool folds_into_rows =
        is_dense && layout.channels > 1 && layout.inner <= kMaxFoldedVectors * vector_width;
    if (is_rows || folds_into_rows) {
      if (is_dense && try_rows(plan, columns_per_channel, vector_width)) return plan;
      if (try_rows(plan, columns_per_channel, 1)) return plan;
    }
    plan.is_vectorized = planes_have_vectors();
    return plan;
  }

  // Whether planes can be walked in vectors: their 16-byte boundaries must be at the same elements of all
  // operands.
  bool planes_have_vectors() const {
    const Strides& first = layout.strides[0];
    const uintptr_t first_pointer = reinterpret_cast<uintptr_t>(pointers[0]);
    return layout.outer_dims <= 1 && layout.inner >= 2 * vector_width &&
           all_operands([&](const Strides& s, uintptr_t pointer) {
             return s.inner == 1 && pointer % 16 == first_pointer % 16 &&
                    (s.channel - first.channel) % vector_width == 0 &&
                    (s.outer[0] - first.outer[0]) % vector_width == 0;
           });
  }

  // Whether rows can be walked in vectors: these must be aligned, and the offsets within a batch must fit into
  // 32 bits.
  bool rows_have_vectors(int64_t columns) const {
    return layout.outer_dims <= 1 && columns % vector_width == 0 &&
           std::max(columns, layout.outer) <= INT32_MAX &&
           all_operands([&](const Strides& s, uintptr_t pointer) {
             return pointer % 16 == 0 && s.outer[0] % vector_width == 0 &&
                    s.outer[0] * kThreads * kBatch <= INT32_MAX;
           });
  }

  // Walks rows in vectors of `width` elements, if that is possible. Chooses the team size, a multiple of
  // whole channels, that leaves the fewest threads and columns without work.
  bool try_rows(LaunchPlan& plan, int64_t columns_per_channel, int64_t width) const {
    const int64_t columns = layout.channels * columns_per_channel,
                  vectors = std::max<int64_t>(1, columns / width);
    // The fewest channels that are whole vectors.
    const int64_t channels = width / std::gcd(width, columns_per_channel),
                  members = channels * columns_per_channel / width;
    if (members > kThreads || (width > 1 && !rows_have_vectors(columns))) return false;
    plan.is_rows = true, plan.is_vectorized = width > 1;
    plan.columns_per_channel = int(columns_per_channel), plan.columns = columns;
    const int64_t max_team = std::min<int64_t>(vectors, merged_operands ? kMaxMergingTeam : kMaxTeam);
    double best = 0;
    for (int64_t n = std::max<int64_t>(1, max_team / members); n && (!best || n * members >= kMinTeam); --n) {
      const int64_t team_size = n * members, threads = kThreads / team_size * team_size;
      const double busy = double(vectors * threads) / double(ceil_div(vectors, team_size) * team_size);
      if (busy > best) best = busy, plan.team_size = int(team_size), plan.tile_channels = int(n * channels);
      if (best == kThreads) break;
    }
    return true;
  }

  int width_of(const LaunchPlan& plan) const { return plan.is_vectorized ? vector_width : 1; }

  // The vectors of each operand in a thread's walk, empty ones included.
  int64_t vectors_per_thread(const LaunchPlan& plan) const {
    const int64_t teams = int64_t(plan.slices) * plan.teams;
    if (plan.is_rows) return ceil_div(plan.units, teams * kBatch) * kBatch;
    const int64_t vectors = ceil_div(plan.segment_length, width_of(plan)),
                  batches = ceil_div(vectors, int64_t(plan.team_size) * kBatch);
    const bool is_aligned = all_operands([&](const Strides& s, uintptr_t pointer) {
      return pointer % 16 == 0 && s.channel % vector_width == 0 && s.outer[0] % vector_width == 0 &&
             layout.inner % vector_width == 0;
    });
    // Elements before the first and after the last vector are walked one by one.
    const int64_t ends =
        plan.is_vectorized && !is_aligned ? ceil_div(2 * (vector_width - 1), plan.team_size) : 0;
    return ceil_div(plan.units, teams) * (batches * kBatch + ends);
  }

  // The fraction of the vectors of all threads that hold data. The last wave of blocks counts as a whole.
  double filled_fraction(const LaunchPlan& plan, int64_t resident) const {
    const int64_t vectors =
        ceil_div(plan.blocks(), resident) * resident * kThreads * vectors_per_thread(plan);
    return double(layout.numel()) / std::max(1.0, double(vectors) * width_of(plan));
  }

  // Sets the slices for so many waves of blocks: at most one slice per iteration of a team's loop.
  void set_slices(LaunchPlan& plan, int64_t resident, int waves) const {
    plan.teams = kThreads / plan.team_size;
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(layout.channels, plan.tile_channels)));
    plan.units = plan.is_rows ? layout.outer : layout.outer * plan.segments;
    const int64_t units_per_turn = int64_t(plan.teams) * (plan.is_rows ? kBatch : 1),
                  max_slices = ceil_div(plan.units, units_per_turn);
    const bool is_one = max_slices == 0 || (merged_operands && plan.tiles > kMaxMergedTiles);
    plan.slices = is_one ? 1 : unsigned(std::clamp<int64_t>(waves * resident / plan.tiles, 1, max_slices));
  }

  // Chooses the segments of a plane, and the team size that leaves the fewest vectors of a batch empty. For
  // example, a plane of 98 vectors (28x28 values of 16 bits) almost fills a batch of 4 vectors of 32 members;
  // of 256 members it would fill a quarter. A team reads whole lines of memory, since a line that two warps
  // write apart takes longer. Planes have several segments if they are fewer than the resident blocks.
  void choose_team_of_planes(LaunchPlan& plan, int64_t resident) const {
    const int64_t vectors_per_plane = ceil_div(layout.inner, width_of(plan));
    const int64_t segments_by_length = ceil_div(vectors_per_plane, kThreads * kBatch * kMaxBatchesPerSegment);
    const int64_t planes = layout.outer * layout.channels,
                  segments_by_blocks =
                      std::min(vectors_per_plane / kThreads, resident / std::max<int64_t>(1, planes));
    const int64_t vectors = ceil_div(vectors_per_plane, std::max(segments_by_length, segments_by_blocks));
    plan.segment_length = vectors * width_of(plan);
    plan.segments = ceil_div(layout.inner, plan.segment_length);
    double best = 0;
    int chosen = kThreads;
    // The first candidate, of 0 batches, is a team of all threads.
    for (int batches = 0; batches <= 2 * kMaxBatchesPerSegment && best < kFullEnough; ++batches) {
      const int64_t members = batches ? ceil_div(vectors, batches * kBatch) : kThreads;
      if (members > kThreads || (batches > 1 && members < kMinTeamOfSeveralBatches)) continue;
      plan.team_size =
          int(plan.is_vectorized ? ceil_div(members, kVectorsPerLine) * kVectorsPerLine : members);
      set_slices(plan, resident, 1);
      const double filled = filled_fraction(plan, resident);
      if (filled > best + kMinGain) best = filled, chosen = plan.team_size;
    }
    plan.team_size = chosen;
  }

  // Divides the values of each tile into slices, for `resident` blocks that run at once.
  void choose_slices(LaunchPlan& plan, int64_t resident, int max_waves) const {
    if (!plan.is_rows) choose_team_of_planes(plan, resident);
    double best = 0;
    int chosen = min_waves;
    for (int waves = min_waves; waves <= max_waves && best < kFullEnough; ++waves) {
      set_slices(plan, resident, waves);
      const double filled = filled_fraction(plan, resident);
      if (filled > best + (merged_operands ? kMinGainMerging : kMinGain)) best = filled, chosen = waves;
    }
    set_slices(plan, resident, chosen);
  }
};

}  // namespace fastvit
