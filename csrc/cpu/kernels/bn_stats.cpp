// bn_stats: mean and M2 (the sum of squared deviations from the mean) of each channel.
//
// Memory:   reads x once; writes two doubles per slice and channel, which csrc/cpu/batch_norm.cpp merges.
// Mapping:  a task takes some channels in a slice (some rows or segments of planes), in the order of memory.
// Numerics: x - pivot and its square are summed over at most 2048 elements of a channel's planes, or about
//           128 rows; the pivot is the mean of the first of them (pivoted_moments.h). The moments are merged
//           in double, in a fixed order (moments.h).
// Source:   Chan, Golub and LeVeque (1979).
#include "../../moments.h"
#include "pivoted_moments.h"

namespace fastvit {
namespace FASTVIT_ISA {  // setup.py compiles this file once per instruction set, each in its own namespace
namespace {

// T: storage type. A: accumulation type. Planes: a span is a plane of one channel (NCHW), and a unit is the
// same segment of the planes of all channels, at one outer index. Rows: a span, and a unit, is a row of all
// channels (channels_last, tokens).
template <class T, class A>
struct BnStatsKernel {
  static constexpr int kRowsAtOnce = 4;

  static void run(const CpuBnStatsParams& args) {
    const StridedOperand<T> x(args.x, args, ForwardOperandIndex::x);
    for_each_task(args.layout, args.plan, [&](const Task& task) {
      double* mean = args.slice_moments + task.slice * 2 * args.layout.channels;
      double* m2 = mean + args.layout.channels;
      for (int64_t c = task.first_channel; c < task.end_channel; ++c) mean[c] = m2[c] = 0;
      if (args.layout.is_rows)
        compute_row_moments(x, task, mean + task.first_channel, m2 + task.first_channel);
      else
        compute_plane_moments(x, args, task, mean, m2);
    });
  }

  static void compute_plane_moments(const StridedOperand<T>& x, const CpuBnStatsParams& args,
                                    const Task& task, double* mean, double* m2) {
    A pivots[kMaxChannelsAtOnce];
    const int64_t values_before_task = values_before_unit(args.layout, args.plan, task.first_unit);
    sum_planes<A>(
        args, &x, /*operand_count=*/1, task,
        // Adds a series, a plane of each of several channels, to sums[first_sum], ...; is_first: sets them.
        [&](const CpuBnStatsParams&, const SpanSeries<T>& series, int first_sum, bool is_first,
            TermPair<A>* sums) {
          for (int k = first_sum; k < first_sum + series.spans; ++k) {
            const T* values = series.in_span(/*operand=*/0, k - first_sum);
            if (is_first) pivots[k] = choose_pivot<T, A>(values, series.length);
            sums[k].add(is_first, sum_deviations(values, series.length, pivots[k]));
          }
        },
        // sums[k] is complete: of `count` values of the channel, from `unit` on. Merges it into mean and m2.
        [&](int k, int64_t channel, const TermPair<A>& sums, int64_t unit, int64_t count) {
          const MeanM2 moments = moments_from_pivot_sums(pivots[k], 1 / double(count),
                                                         sum_lanes<A>(sums.first), sum_lanes<A>(sums.second));
          const int64_t values_before = values_before_unit(args.layout, args.plan, unit) - values_before_task;
          MergeWeights::from_counts(double(values_before), double(count))
              .merge(mean[channel], m2[channel], moments.mean, moments.m2);
        });
  }

  // mean[0], m2[0]: of the task's first channel. A task has at most kMaxSegmentLength channels.
  static void compute_row_moments(const StridedOperand<T>& x, const Task& task, double* mean, double* m2) {
    const int64_t first_unit = task.first_unit, end_unit = task.end_unit, first_channel = task.first_channel,
                  length = task.end_channel - first_channel;
    constexpr int64_t kMaxPivotRows = 8;  // a channel's pivot is the mean of the chunk's first rows
    T buffer[kMaxSegmentLength];          // for a row without unit stride; then k is always 0
    const T* rows[kRowsAtOnce];
    alignas(64) A pivots[kMaxSegmentLength];
    RowSums<A, kRowsAtOnce> sums;
    RowPrefetcher<T, kRowsAtOnce> prefetcher{x, length};
    const auto load_row = [&](int k, int64_t row) {
      rows[k] = x.gather(x.address(row, first_channel, /*inner=*/0), length, buffer);
      if (k == 0) prefetcher.set_row(rows[0]);
    };
    for (int64_t begin = first_unit, end; begin < end_unit; begin = end) {
      end = find_chunk_end(begin, end_unit);  // a chunk: about 128 rows, summed in A
      const int64_t pivot_end = minimum(begin + kMaxPivotRows, end);
      sums.sum(length, begin, pivot_end, x.has_unit_stride(length), load_row,
               [&](auto position, int k) { return TermPair<A>{position.load(rows[k]), Simd<A>{}}; });
      sums.for_each_channel(length, [&](int64_t c, A sum, A) { pivots[c] = sum / A(pivot_end - begin); });
      sums.sum(length, begin, end, x.has_unit_stride(length), load_row, [&](auto position, int k) {
        if (k == 0) prefetcher.prefetch(position);  // for all kRowsAtOnce
        return compute_deviation_terms<A>(position.load(rows[k]), position.load(pivots));
      });
      const double count = double(end - begin), inverse_count = 1 / count;
      const MergeWeights weights = MergeWeights::from_counts(double(begin - first_unit), count);
      sums.for_each_channel(length, [&](int64_t c, A deviations, A squares) {
        const MeanM2 moments = moments_from_pivot_sums(pivots[c], inverse_count, deviations, squares);
        weights.merge(mean[c], m2[c], moments.mean, moments.m2);
      });
    }
  }
};

}  // namespace

void bn_stats(const CpuBnStatsParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() { BnStatsKernel<T, Accumulation<T>>::run(args); });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
