// layer_norm_forward, per row: y = (x - mean) * invstd * gamma + beta.
// layer_norm_backward, per row: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)), with g = dy * gamma;
// and per column: sum dy, sum dy * xhat.
//
// Memory:   forward reads x, writes y; backward reads x, dy, writes dx. Later passes over a short row hit L1.
// Mapping:  forward: threads take rows. Backward: a task is a slice of rows, which fixes the order of sums.
// Numerics: the moments of a row's segments (pivoted_moments.h) are merged in double. Of the accumulation
//           type are a row's sums of g and g * xhat, and a column's sums over a chunk, at most 128 rows.
//           Chunks are added in double.
// Source:   Ba, Kiros and Hinton, arXiv:1607.06450; moments: Chan, Golub and LeVeque (1979).
#include <cmath>

#include "../../moments.h"
#include "pivoted_moments.h"
#include "spans.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

// T: storage type of x and dx. Y: storage type of y and dy. A: accumulation type.
template <class T, class Y, class A>
struct LayerNormForward {
  struct Row {
    const T* x;
    Y* y;
    A mean, invstd;
  };
  // non_temporal: the part of y that is stored past the caches.
  static void write_y(const Row& row, int64_t columns, NonTemporalRange non_temporal, const A* gamma,
                      const A* beta) {
    const T* x = row.x;
    Y* y = row.y;
    const A mean = row.mean, invstd = row.invstd;
    for_each_vector<A>(
        columns, non_temporal,
        [&](auto position) {
          return (position.load(x) - mean) * invstd * position.load(gamma) + position.load(beta);
        },
        [&](auto position, Simd<A> result) { position.store(y, result); });
  }

  static void run(const CpuLayerNormForwardParams& args) {
    const int64_t columns = args.columns;
    const T* x = static_cast<const T*>(args.x);
    Y* y = static_cast<Y*>(args.y);
    const A *gamma = static_cast<const A*>(args.gamma), *beta = static_cast<const A*>(args.beta);
    A *mean = static_cast<A*>(args.saved), *invstd = mean + args.rows;
    const bool stores_past_cache = is_too_large_for_cache<Y>(args.rows * columns);
    torch::stable::parallel_for(0, args.rows, parallel_grain(columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        double row_mean = 0, row_m2 = 0;
        for (int64_t first = 0; first < columns; first += kMaxSegmentLength) {
          const int64_t length = minimum(columns - first, kMaxSegmentLength);
          const MeanM2 segment = compute_moments<T, A>(x + r * columns + first, length);
          MergeWeights::from_counts(double(first), double(length))
              .merge(row_mean, row_m2, segment.mean, segment.m2);
        }
        mean[r] = A(row_mean);
        invstd[r] = A(1 / std::sqrt(row_m2 / double(columns) + args.eps));
        write_y({x + r * columns, y + r * columns, mean[r], invstd[r]}, columns,
                NonTemporalRange(stores_past_cache, y + r * columns, columns, kLanes<A>), gamma, beta);
      }
      fence_non_temporal();
    });
  }
};

template <class T, class Y, class A>
struct LayerNormBackward {
  static constexpr int L = kLanes<A>;

  // The index of the L sums to which a vector of a row is added. The last vector may overlap the one before:
  // its own L sums come after those of all full vectors.
  static int64_t sum_index(FullVector<A> position) { return position.i; }
  static int64_t sum_index(LastVector<A> position) { return position.length / L * L; }
  static FASTVIT_FORCE_INLINE void add(A* sums, Simd<A> terms) { store<A>(sums, load<A>(sums) + terms); }

  struct Row {
    const T* x;
    const Y* dy;
    T* dx;
    A mean, invstd;
  };
  // Writes a row of dx, and with kHasSums adds to the columns' sums of dy and of dy * xhat. non_temporal: the
  // part of dx that is stored past the caches.
  template <bool kHasSums>
  static void process_row(const Row& row, int64_t columns, NonTemporalRange non_temporal, const A* gamma,
                          A* chunk_dy, A* chunk_dy_xhat) {
    const T* x = row.x;
    const Y* dy = row.dy;
    T* dx = row.dx;
    const A mean = row.mean, invstd = row.invstd;
    const auto compute_xhat = [&](auto position) -> Simd<A> { return (position.load(x) - mean) * invstd; };
    const TermPair<A> sums = sum_span<A, /*kAccumulators=*/2>(columns, [&](auto position) {
      const Simd<A> dy_values = position.load(dy), xhat = compute_xhat(position),
                    g = dy_values * position.load(gamma);
      if constexpr (kHasSums) {
        add(chunk_dy + sum_index(position), dy_values);
        add(chunk_dy_xhat + sum_index(position), dy_values * xhat);
      }
      return TermPair<A>{g, g * xhat};  // sum_span drops what overlaps
    });
    const A mean_g = sum_lanes<A>(sums.first) / A(columns),
            mean_g_xhat = sum_lanes<A>(sums.second) / A(columns);
    for_each_vector<A>(
        columns, non_temporal,
        [&](auto position) -> Simd<A> {
          return (position.load(dy) * position.load(gamma) - mean_g - compute_xhat(position) * mean_g_xhat) *
                 invstd;
        },
        [&](auto position, Simd<A> result) { position.store(dx, result); });
  }

  static void run(const CpuLayerNormBackwardParams& args) {
    args.sums ? process_slices<true>(args) : process_slices<false>(args);
  }

  template <bool kHasSums>
  static void process_slices(const CpuLayerNormBackwardParams& args) {
    const int64_t columns = args.columns;
    const T* x = static_cast<const T*>(args.x);
    const Y* dy = static_cast<const Y*>(args.dy);
    T* dx = static_cast<T*>(args.dx);
    const A* gamma = static_cast<const A*>(args.gamma);
    const A *mean = static_cast<const A*>(args.saved), *invstd = mean + args.rows;
    const bool stores_past_cache = is_too_large_for_cache<T>(args.rows * columns);
    torch::stable::parallel_for(0, args.slices, 1, [&](int64_t first_slice, int64_t end_slice) {
      for (int64_t slice = first_slice; slice < end_slice; ++slice) {
        A* chunk_dy = kHasSums ? static_cast<A*>(args.chunk_sums) + slice * 2 * args.padded_columns : nullptr;
        A* chunk_dy_xhat = kHasSums ? chunk_dy + args.padded_columns : nullptr;
        const int64_t end = args.rows * (slice + 1) / args.slices;
        for (int64_t r = args.rows * slice / args.slices; r < end;) {
          const int64_t chunk_end = minimum(r + kChunkRows, end);
          for (; r < chunk_end; ++r)
            process_row<kHasSums>({x + r * columns, dy + r * columns, dx + r * columns, mean[r], invstd[r]},
                                  columns, NonTemporalRange(stores_past_cache, dx + r * columns, columns, L),
                                  gamma, chunk_dy, chunk_dy_xhat);
          if constexpr (kHasSums) {
            double* slice_sums = args.slice_sums + slice * 2 * columns;
            add_chunk_to_slice(chunk_dy, columns, slice_sums);
            add_chunk_to_slice(chunk_dy_xhat, columns, slice_sums + columns);
          }
        }
      }
      fence_non_temporal();
    });
  }

  // Adds a chunk's sums to those of the slice, and sets the chunk's to 0.
  static void add_chunk_to_slice(A* chunk_sums, int64_t columns, double* slice_sums) {
    // The last vector's L sums begin at full_columns. Its last lanes have the columns that no full vector
    // has; its first lanes repeat earlier columns or are empty.
    const int64_t full_columns = columns / L * L,
                  sum_count = full_columns < columns ? full_columns + L : columns;
    for (int64_t c = 0; c < full_columns; ++c) slice_sums[c] += double(chunk_sums[c]);
    for (int64_t c = full_columns; c < columns; ++c)
      slice_sums[c] += double(chunk_sums[c + sum_count - columns]);
    for (int64_t c = 0; c < sum_count; ++c) chunk_sums[c] = 0;
  }
};

}  // namespace

void layer_norm_forward(const CpuLayerNormForwardParams& args) {
  dispatch_layer_norm_types<Half, BFloat16>(args.dtype, args.output_dtype, [&]<class T, class Y>() {
    LayerNormForward<T, Y, Accumulation<T>>::run(args);
  });
}

void layer_norm_backward(const CpuLayerNormBackwardParams& args) {
  dispatch_layer_norm_types<Half, BFloat16>(args.dtype, args.output_dtype, [&]<class T, class Y>() {
    LayerNormBackward<T, Y, Accumulation<T>>::run(args);
  });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
