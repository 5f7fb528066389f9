// bn_stats: mean and M2 (sum of squared deviations) per channel.
// Memory   reads x once; writes two doubles per slice and channel.
// Mapping  task = (slice of planes or rows, block of channels), in the order of memory.
// Numerics the deviations of a run of planes, or of a group of rows, from the mean of its first values, and
//          their squares (pivoted_moments.h). They merge in double, in order (moments.h).
// Source   Chan, Golub, LeVeque (1979).
#include "../../moments.h"
#include "pivoted_moments.h"

namespace fastvit {
namespace FASTVIT_ISA {
namespace {

template <class T, class A>
struct Stats {
  static constexpr int kRowsAtOnce = 4;

  static void run(const CpuBnStatsParams& args) {
    const StridedOperand<T> x(args.x, args.layout, ForwardStrides::x);
    for_each_task(args.layout, args.plan, [&](const Task& task) {
      double* mean = args.partial + task.slice * 2 * args.layout.channels;
      double* m2 = mean + args.layout.channels;
      for (int64_t c = task.c0; c < task.c1; ++c) mean[c] = m2[c] = 0;
      if (args.layout.is_rows)
        rows(x, task, mean + task.c0, m2 + task.c0);
      else
        planes(x, args, task, mean, m2);
    });
  }

  static void planes(const StridedOperand<T>& x, const CpuBnStatsParams& args, const Task& task, double* mean,
                     double* m2) {
    A center[kMaxChannelsAtOnce];
    const int64_t before = values_before_unit(args.layout, args.plan, task.first);
    sum_planes<A>(
        args, &x, 1, task,
        [&](const CpuBnStatsParams&, const SpanGroup<T>& spans, int first, bool is_first, TermPair<A>* sums) {
          for (int k = first; k < first + spans.count; ++k) {
            const T* values = spans.in(0, k - first);
            if (is_first) center[k] = choose_pivot<T, A>(values, spans.n);
            sums[k].add(is_first, sum_deviations(values, spans.n, center[k]));
          }
        },
        [&](int k, int64_t c, const TermPair<A>& sums, int64_t step, int64_t count) {
          const MeanM2 moments = from_pivot_sums(center[k], 1 / double(count), sum_lanes<A>(sums.first),
                                                 sum_lanes<A>(sums.second));
          MergeWeights::of_counts(double(values_before_unit(args.layout, args.plan, step) - before),
                                  double(count))
              .merge(mean[c], m2[c], moments.mean, moments.m2);
        });
  }

  static void rows(const StridedOperand<T>& x, const Task& task, double* mean, double* m2) {
    const int64_t first = task.first, last = task.last, c0 = task.c0, n = task.c1 - c0;
    constexpr int64_t kFirst = 8;  // rows whose mean is the center
    T buffer[kMaxSegment];
    const T* row[kRowsAtOnce];
    alignas(64) A center[kMaxSegment];
    RowSums<A, kRowsAtOnce> sums;
    RowPrefetcher<T, kRowsAtOnce> next{x, n};
    const auto get = [&](int k, int64_t r) {
      row[k] = x.read(x.at(x.outer(r), c0, 0), n, buffer);
      if (k == 0) next.after(row[0]);
    };
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = chunk_end(begin, last);
      const int64_t some = begin + kFirst < end ? begin + kFirst : end;
      sums.sum(n, begin, some, x.has_unit_stride(n), get,
               [&](auto at, int k) { return TermPair<A>{at.load(row[k]), Simd<A>{}}; });
      sums.for_each_channel(n, [&](int64_t c, A sum, A) { center[c] = sum / A(some - begin); });
      sums.sum(n, begin, end, x.has_unit_stride(n), get, [&](auto at, int k) {
        if (k == 0) next.fetch(at);
        return deviations<A>(at.load(row[k]), at.load(center));
      });
      const double size = double(end - begin), fraction = 1 / size;
      const MergeWeights weights = MergeWeights::of_counts(double(begin - first), size);
      sums.for_each_channel(n, [&](int64_t c, A deviations, A squares) {
        const MeanM2 moments = from_pivot_sums(center[c], fraction, deviations, squares);
        weights.merge(mean[c], m2[c], moments.mean, moments.m2);
      });
    }
  }
};

}  // namespace

void bn_stats(const CpuBnStatsParams& args) {
  dispatch_storage_type(args.dtype, [&]<class T>() { Stats<T, Accumulation<T>>::run(args); });
}

}  // namespace FASTVIT_ISA
}  // namespace fastvit
