// CacheTiles divides the channels of an op that makes two passes over its tensors: one for the statistics or
// the sums, and one for the result. The op makes both passes over a cache tile (some channels) before it
// takes the next one, so that the second pass finds the tile's values in the caches.
//
// Only planes (NCHW) are divided. In a row (channels_last, tokens) the channels of a tile would be a part of
// the row. Reading rows in pieces takes about three times as long.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "kernel_table.h"

namespace fastvit {

struct CacheTiles {
  // What the first pass over a tile reads: about as much as a core has in L2 and its share of L3.
  static constexpr int64_t kTileBytes = 4 << 20;
  // A call whose first pass reads no more than this is one tile: most of it stays in the caches anyway.
  static constexpr int64_t kMaxUndividedBytes = 4 * kTileBytes;
  // The adjacent planes of a tile, at one outer index, have at least as many bytes. Shorter runs are read at
  // less than the memory's speed, and tiles would cost more than they gain.
  static constexpr int64_t kMinRunBytes = 32 << 10;

  CpuPlan plan;       // of the call
  int64_t count = 1;  // number of tiles

  // reduced_operands: number of tensors that the first pass reads.
  CacheTiles(const WalkLayout& layout, ScalarType dtype, int reduced_operands) : plan(plan_cpu_work(layout)) {
    const int64_t element_size = dispatch_storage_type<c10::Half, c10::BFloat16>(
                      dtype, []<class T>() { return int64_t(sizeof(T)); }),
                  plane_bytes = layout.inner * element_size,
                  channel_bytes = layout.outer * plane_bytes * reduced_operands;
    const bool planes_are_adjacent = !layout.is_rows && layout.strides[0].channel == layout.inner;
    if (!planes_are_adjacent || channel_bytes * layout.channels <= kMaxUndividedBytes ||
        channel_bytes > 2 * kTileBytes)
      return;
    // Every thread takes as many tiles as the others.
    const int64_t tile_channels = std::max<int64_t>(1, kTileBytes / channel_bytes),
                  threads = torch::stable::get_num_threads(),
                  tiles = ceil_div(layout.channels, tile_channels * threads) * threads;
    // channels / tiles: of the smallest tile; 0 if there are more tiles than channels.
    if (layout.channels / tiles * plane_bytes >= kMinRunBytes) count = tiles;
  }

  // Calls process(plan) with the plan of every tile, in parallel. A tile's plan has the slices of the call's.
  // A parallel_for of a kernel within runs in the thread that took the tile.
  template <class Process>
  void for_each(const Process& process) const {
    if (count == 1) return process(plan);
    torch::stable::parallel_for(0, count, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) {
        CpuPlan tile_plan = plan;
        tile_plan.tiles = 1;
        tile_plan.first_channel = plan.channels * tile / count;
        tile_plan.channels = plan.channels * (tile + 1) / count - tile_plan.first_channel;
        process(tile_plan);
      }
    });
  }
};

}  // namespace fastvit
