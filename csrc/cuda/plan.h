// LaunchPlanner divides the work of an op among blocks and threads, on the host, for tensors of any strides.
// Its result is a LaunchPlan. All tensors of an op are viewed as (outer, channels, inner), see walk_layout.h.
//
// A block takes a tile (some channels) and a slice (a share of the values of these channels): a number of
// units, which its teams share. The members of a team are threads that access consecutive memory.
//   planes  The fastest dimension is inner. A tile is one channel; a unit is a plane (the inner dimension for
//           one outer index and one channel), or a segment (a part) of a long plane.
//   rows    The fastest dimension is channels. A unit is a row: all channels for one outer index, each a
//           column. A block walks the columns of its tile. A member has the same columns in every row, so the
//           constants of its channels stay in registers.
//   folded  Short contiguous planes, such as 7x7 and 14x14, are walked as rows of channels * inner columns,
//           so that loads can be 16 bytes wide. A channel then has `inner` columns (columns_per_channel).
// An operand is a tensor that the kernel reads or writes. A vector is what one load moves: 16 bytes, or one
// element. A batch is the vectors that a thread has in flight, at most kMaxBatchVectors of each operand.
// Blocks that are resident at the same time are a wave. The blocks of a single launch may walk several tiles
// in turn, in rounds of tiles_at_once tiles, so that only the values of these must fit into shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../walk_layout.h"

namespace fastvit {

constexpr int kThreads = 256;                // threads of a block, in every kernel
constexpr int kBlocksPerMultiprocessor = 2;  // usual launch bound; leaves 128 registers for a thread
constexpr int kMaxBatchVectors = 4;          // vectors of each operand that a thread has in flight
// The same in a reduction of so many operands: fewer of three, to save registers.
FASTVIT_HOST_DEVICE constexpr int batch_vectors_of_reduction(int operands) {
  return operands > 2 ? kMaxBatchVectors / 2 : kMaxBatchVectors;
}
// A reduction of more tiles has one slice per tile, and merges none. Merging takes counters in global memory,
// of which a stream has a fixed number (launch_memory.h).
constexpr int kMaxMergedTiles = 4096;

// Rows: limits of a team and of its columns. In a folded walk a team may need more members, see try_rows.
constexpr int kMaxTeam = 32;  // members; 32 members access 512 bytes of a row
// The same in a reduction, where the results of threads are merged: the fewer channels a tile has, the more
// threads merge each of them.
constexpr int kMaxMergingTeam = 16;
constexpr int kMinTeam = 4;                     // members; 4 vectors are two sectors of 32 bytes
constexpr int kMaxTileChannels = 8 * kMaxTeam;  // channels; a vector of 16 bytes holds at most 8 elements
constexpr int kMaxFoldedVectors = 64;  // vectors of the longest plane that is walked as a part of a row

// Planes: limits of a team and of a segment.
constexpr int kVectorsPerLine = 8;            // a line of 128 bytes has 8 vectors of 16 bytes
constexpr int kMaxBatchesPerSegment = 4;      // batches of a thread in a segment, in a team of kThreads
constexpr int kMinTeamOfSeveralBatches = 16;  // members of a team, if each has several batches in a segment

// The planner tries several plans. The threads' batches have places for vectors. A plan's filled fraction is
// the share of these places that hold data.
constexpr double kFullEnough = 0.95;     // the search ends at this filled fraction
constexpr double kMinGain = 0.02;        // a later plan is chosen only if its fraction is larger by this
constexpr double kMinGainMerging = 0.1;  // the same in a reduction, where more waves are more slices to merge
constexpr int kMaxWaves = 4;             // with 4 waves an incomplete last one is a small part of the time

struct DeviceLimits {
  int multiprocessors = 1;
  // A single launch is one kernel for the statistics and the op, which keeps its data in shared memory. It
  // has at most this number of blocks per multiprocessor, and each of them at most smem_cache_bytes of data.
  int single_launch_blocks = kBlocksPerMultiprocessor;
  int64_t smem_cache_bytes = 0;
};

struct LaunchPlan {
  WalkLayout layout;
  bool is_rows = false;          // walked as rows, also if planes are folded into rows; otherwise as planes
  bool is_vectorized = false;    // a vector has 16 bytes; otherwise it is one element
  int team_size = 1, teams = 1;  // members of a team; teams of a block
  int columns_per_channel = 1;   // 1, or `inner` if planes are folded into rows
  int tile_channels = 1;         // channels of a tile; the last tile may have fewer
  unsigned tiles = 1, slices = 1;
  // Tiles that the blocks of a launch walk at the same time. A block then goes on to the tile that is this
  // many further. It equals `tiles`, but in a single launch of several rounds.
  unsigned tiles_at_once = 1;
  int64_t columns = 1;                       // elements of a row
  int64_t segment_length = 1, segments = 1;  // elements of a plane's segment; segments of a plane
  int64_t units = 0;                         // units of a tile: the sum over its slices
  // Vectors for which each thread of a single launch has a place in shared memory, of each operand that it
  // keeps. With 0 the op cannot be a single launch.
  int vectors_in_shared = 0;

  int64_t blocks() const { return int64_t(tiles_at_once) * slices; }
};

struct LaunchPlanner {
  const WalkLayout& layout;
  const void* const* pointers;  // one per operand, in the order of layout.strides
  int operands, element_size;   // number of operands; bytes of an element
  const DeviceLimits& limits;
  // How many operands a reduction over each channel reads. 0: the op has no reduction, and merges no slices.
  int reduced_operands;
  // Above 1 for blocks that are cheap to begin: those of later waves start where earlier ones have ended.
  int min_waves = 1;
  int vector_width = 16 / element_size;  // elements of a vector of 16 bytes

  // Plans a single launch, whose blocks keep their values of the reduced operands in shared memory: all tiles
  // at once if they fit, else in the fewest rounds. In the result vectors_in_shared is 0 if the values of one
  // tile do not fit, if vectors do not have 16 bytes, or if the op has no reduction; plan() completes a plan
  // with 0.
  LaunchPlan plan_single_launch() const {
    LaunchPlan plan = choose_walk();
    plan.tiles = unsigned(std::max<int64_t>(1, ceil_div(layout.channels, plan.tile_channels)));
    plan.tiles_at_once = plan.tiles;
    // Shared memory for one vector of each reduced operand in each thread.
    const int64_t bytes_per_vector = int64_t(reduced_operands) * kThreads * 16;
    if (bytes_per_vector == 0 || !plan.is_vectorized || bytes_per_vector > limits.smem_cache_bytes)
      return plan;
    const int64_t max_vectors = limits.smem_cache_bytes / bytes_per_vector,
                  resident_blocks = int64_t(limits.multiprocessors) * limits.single_launch_blocks;
    // Several rounds are at least so many that their values fit, and that a tile has two blocks: a tile for
    // which one block has room needs no rounds.
    const int64_t tiles = plan.tiles,
                  min_rounds = std::max(
                      ceil_div(layout.numel(), resident_blocks * kThreads * max_vectors * vector_width),
                      ceil_div(2 * tiles, resident_blocks));
    for (int64_t rounds = 1; rounds <= tiles;) {
      plan.tiles_at_once = unsigned(ceil_div(tiles, rounds));
      choose_slices(plan, resident_blocks, /*max_waves=*/1);
      const int64_t vectors = places_per_thread(plan);
      if (vectors <= max_vectors) plan.vectors_in_shared = int(vectors);
      if (vectors <= max_vectors || plan.tiles_at_once == 1 || tiles > kMaxMergedTiles) break;
      rounds = std::max(min_rounds, ceil_div(tiles, plan.tiles_at_once - 1));  // one tile less, or fewer
    }
    return plan;
  }

  // Plans a launch that keeps no values in shared memory. It divides the values as plan_single_launch() does
  // if a single launch is possible, so that an op gives the same bits in a single launch and in several.
  // blocks_per_multiprocessor(plan) returns how many blocks of the plan's kernel are resident on a
  // multiprocessor.
  LaunchPlan plan(const auto& blocks_per_multiprocessor) const {
    LaunchPlan plan = plan_single_launch();
    plan.tiles_at_once = plan.tiles;
    if (plan.vectors_in_shared == 0)
      choose_slices(plan, limits.multiprocessors * std::max<int64_t>(1, blocks_per_multiprocessor(plan)),
                    kMaxWaves);
    return plan;
  }

 private:
  // Whether condition(strides, address) is true for every operand.
  bool all_operands(const auto& condition) const {
    for (int k = 0; k < operands; ++k)
      if (!condition(layout.strides[k], reinterpret_cast<uintptr_t>(pointers[k]))) return false;
    return true;
  }

  // Chooses between rows and planes, and whether vectors have 16 bytes; for rows also the team and the tile.
  LaunchPlan choose_walk() const {
    LaunchPlan plan;
    plan.layout = layout;
    const bool is_rows = layout.is_rows || layout.outer == 0;  // empty tensors have 0 rows
    const int64_t columns_per_channel = is_rows ? 1 : layout.inner;
    const bool columns_have_no_gaps = all_operands([&](const Strides& strides, uintptr_t) {
      return strides.channel == columns_per_channel && (is_rows || strides.inner == 1);
    });
    const bool folds_into_rows =
        columns_have_no_gaps && layout.channels > 1 && layout.inner <= kMaxFoldedVectors * vector_width;
    if (is_rows || folds_into_rows) {
      if (columns_have_no_gaps && try_rows(plan, columns_per_channel, vector_width)) return plan;
      if (try_rows(plan, columns_per_channel, /*width=*/1)) return plan;
    }
    plan.is_vectorized = planes_have_vectors();
    return plan;
  }

  // Whether planes can be walked in vectors of 16 bytes. The 16-byte boundaries of all operands must be at
  // the same elements; a plane may begin between two boundaries.
  bool planes_have_vectors() const {
    const Strides& strides0 = layout.strides[0];
    const uintptr_t address0 = reinterpret_cast<uintptr_t>(pointers[0]);
    return layout.outer_dims <= 1 && layout.inner >= 2 * vector_width &&
           all_operands([&](const Strides& strides, uintptr_t address) {
             return strides.inner == 1 && address % 16 == address0 % 16 &&
                    (strides.channel - strides0.channel) % vector_width == 0 &&
                    (strides.outer[0] - strides0.outer[0]) % vector_width == 0;
           });
  }

  // Whether rows can be walked in vectors of 16 bytes. Every vector must be aligned. Numbers of rows and
  // columns, and offsets within a batch, must fit into 32 bits.
  bool rows_have_vectors(int64_t columns) const {
    return layout.outer_dims <= 1 && columns % vector_width == 0 &&
           std::max(columns, layout.outer) <= INT32_MAX &&
           all_operands([&](const Strides& strides, uintptr_t address) {
             return address % 16 == 0 && strides.outer[0] % vector_width == 0 &&
                    strides.outer[0] * kThreads * kMaxBatchVectors <= INT32_MAX;
           });
  }

  // Plans a walk of rows in vectors of `width` elements, and returns whether that is possible. Chooses the
  // team size that keeps the most threads of a block busy, on average over the tiles. A team has whole
  // channels.
  bool try_rows(LaunchPlan& plan, int64_t columns_per_channel, int64_t width) const {
    const int64_t columns = layout.channels * columns_per_channel,
                  vectors = std::max<int64_t>(1, columns / width);
    // A bundle is the fewest channels whose columns fill whole vectors. It has a member for each vector.
    const int64_t bundle_channels = width / std::gcd(width, columns_per_channel),
                  bundle_members = bundle_channels * columns_per_channel / width;
    if (bundle_members > kThreads || (width > 1 && !rows_have_vectors(columns))) return false;
    plan.is_rows = true, plan.is_vectorized = width > 1;
    plan.columns_per_channel = int(columns_per_channel), plan.columns = columns;
    const int64_t max_team = std::min<int64_t>(vectors, reduced_operands ? kMaxMergingTeam : kMaxTeam);
    double max_busy_threads = 0;
    for (int64_t bundles = std::max<int64_t>(1, max_team / bundle_members);
         bundles && (!max_busy_threads || bundles * bundle_members >= kMinTeam); --bundles) {
      const int64_t team_size = bundles * bundle_members, threads = kThreads / team_size * team_size;
      // The threads of a block that have columns, on average over the tiles.
      const double busy_threads =
          double(vectors * threads) / double(ceil_div(vectors, team_size) * team_size);
      if (busy_threads > max_busy_threads) {
        max_busy_threads = busy_threads;
        plan.team_size = int(team_size), plan.tile_channels = int(bundles * bundle_channels);
      }
      if (max_busy_threads == kThreads) break;
    }
    return true;
  }

  int elements_per_vector(const LaunchPlan& plan) const { return plan.is_vectorized ? vector_width : 1; }

  // The places for vectors of each operand in a thread's walk, in whole batches.
  int64_t places_per_thread(const LaunchPlan& plan) const {
    const int64_t teams = int64_t(plan.slices) * plan.teams,
                  batch_vectors = batch_vectors_of_reduction(reduced_operands);
    if (plan.is_rows) return ceil_div(plan.units, teams * batch_vectors) * batch_vectors;
    const int64_t vectors = ceil_div(plan.segment_length, elements_per_vector(plan)),
                  batches = ceil_div(vectors, int64_t(plan.team_size) * batch_vectors);
    const bool units_are_aligned = all_operands([&](const Strides& strides, uintptr_t address) {
      return address % 16 == 0 && strides.channel % vector_width == 0 &&
             strides.outer[0] % vector_width == 0 && layout.inner % vector_width == 0;
    });
    // Elements before the first and after the last whole vector of a unit are walked one by one.
    const int64_t single_elements =
        plan.is_vectorized && !units_are_aligned ? ceil_div(2 * (vector_width - 1), plan.team_size) : 0;
    return ceil_div(plan.units, teams) * (batches * batch_vectors + single_elements);
  }

  // The share of the places for vectors that hold data of the tiles at once. The blocks that an incomplete
  // last wave lacks count as blocks without data.
  double filled_fraction(const LaunchPlan& plan, int64_t resident_blocks) const {
    const int64_t places =
        ceil_div(plan.blocks(), resident_blocks) * resident_blocks * kThreads * places_per_thread(plan);
    const double values = double(layout.numel()) * (double(plan.tiles_at_once) / plan.tiles);
    return values / std::max(1.0, double(places) * elements_per_vector(plan));
  }

  // Sets teams and units. Sets slices to as many as fit into `waves` waves of blocks, but so few that each
  // team has a batch of rows, a plane or a segment in its slice.
  void set_slices(LaunchPlan& plan, int64_t resident_blocks, int waves) const {
    plan.teams = kThreads / plan.team_size;
    plan.units = plan.is_rows ? layout.outer : layout.outer * plan.segments;
    const int64_t min_units =
                      int64_t(plan.teams) * (plan.is_rows ? kMaxBatchVectors : 1),  // units of a slice
        max_slices = ceil_div(plan.units, min_units);
    const bool has_one_slice = max_slices == 0 || (reduced_operands && plan.tiles > kMaxMergedTiles);
    plan.slices =
        has_one_slice
            ? 1
            : unsigned(std::clamp<int64_t>(waves * resident_blocks / plan.tiles_at_once, 1, max_slices));
  }

  // Chooses the segments of a plane, and the team size whose batches have the fewest empty places. For
  // example, a plane of 98 vectors (28x28 values of 16 bits) fills three quarters of the 128 places in one
  // batch of each of 32 members, but a tenth of the 1024 places of 256 members. A team accesses whole lines
  // of memory, since a line takes longer if two warps write a part of it each. A plane is divided into
  // segments if it is longer than kMaxBatchesPerSegment batches of all threads, or if there are two resident
  // blocks or more for each plane of the tiles at once; then a segment has a vector or more for each thread.
  void choose_segments_and_team(LaunchPlan& plan, int64_t resident_blocks) const {
    const int64_t vectors_per_plane = ceil_div(layout.inner, elements_per_vector(plan));
    const int64_t segments_by_length =
        ceil_div(vectors_per_plane, kThreads * kMaxBatchVectors * kMaxBatchesPerSegment);
    const int64_t planes = layout.outer * plan.tiles_at_once,
                  segments_by_blocks =
                      std::min(vectors_per_plane / kThreads, resident_blocks / std::max<int64_t>(1, planes));
    const int64_t vectors = ceil_div(vectors_per_plane, std::max(segments_by_length, segments_by_blocks));
    plan.segment_length = vectors * elements_per_vector(plan);
    plan.segments = ceil_div(layout.inner, plan.segment_length);
    double best_fraction = 0;
    int best_team_size = kThreads;
    // A candidate is the team that walks a segment in `batches` batches. 0 stands for a team of all threads.
    for (int batches = 0; batches <= 2 * kMaxBatchesPerSegment && best_fraction < kFullEnough; ++batches) {
      const int64_t members = batches ? ceil_div(vectors, batches * kMaxBatchVectors) : kThreads;
      if (members > kThreads || (batches > 1 && members < kMinTeamOfSeveralBatches)) continue;
      plan.team_size =
          int(plan.is_vectorized ? ceil_div(members, kVectorsPerLine) * kVectorsPerLine : members);
      set_slices(plan, resident_blocks, /*waves=*/1);
      const double fraction = filled_fraction(plan, resident_blocks);
      if (fraction > best_fraction + kMinGain) best_fraction = fraction, best_team_size = plan.team_size;
    }
    plan.team_size = best_team_size;
  }

  // Divides planes into segments and chooses their team, then divides the values of each tile into slices.
  // resident_blocks is the number of blocks that the device runs at the same time.
  void choose_slices(LaunchPlan& plan, int64_t resident_blocks, int max_waves) const {
    if (!plan.is_rows) choose_segments_and_team(plan, resident_blocks);
    const double min_gain = reduced_operands ? kMinGainMerging : kMinGain;
    double best_fraction = 0;
    int best_waves = min_waves;
    for (int waves = min_waves; waves <= max_waves && best_fraction < kFullEnough; ++waves) {
      set_slices(plan, resident_blocks, waves);
      const double fraction = filled_fraction(plan, resident_blocks);
      if (fraction > best_fraction + min_gain) best_fraction = fraction, best_waves = waves;
    }
    set_slices(plan, resident_blocks, best_waves);
  }
};

}  // namespace fastvit
