// The ops of batch norm on the CPU: the O(C) part, in double. It merges the results of slices (parts of each
// channel's values, which a kernel reduces separately), updates the running statistics, exchanges numbers
// between ranks, and computes the constants per channel that the kernels read.
//
// A is the accumulation type: double for tensors of double, else float. xhat is (x - mean) * invstd, dv is
// the gradient of the activation's input. A count is stored as two numbers (pack_count), so that a large
// count is exact in float. saved: mean[C], invstd[C], count. With rows, a unit is a row. With planes, a unit
// is the same segment of the planes of all channels, at one index of the outer dimensions.
#include <cmath>
#include <limits>

#include "../moments.h"
#include "../sync/cpu_exchange.h"
#include "channel_vector.h"
#include "kernel_table.h"

namespace fastvit {
namespace {

// Adds 1 to num_batches_tracked, if the call has it. Returns the share of the new statistics in the running
// statistics. After a failed exchange between ranks values_per_channel is NaN, and nothing is added.
double count_forward(const BnForwardArgs& args, double values_per_channel) {
  if (!args.num_batches_tracked || std::isnan(values_per_channel)) return args.momentum;
  ++*args.num_batches_tracked;
  return args.cumulative_average ? 1.0 / double(*args.num_batches_tracked) : args.momentum;
}

void update_running_stats(const BnForwardArgs& args, int64_t channel, const Moments<double>& moments,
                          double new_share) {
  if (!args.running_mean.data || !(moments.count > 0)) return;
  const double unbiased_var = moments.m2 / std::max(moments.count - 1, 1.0);
  const double mean = load_channel(args.running_mean, channel, /*value_if_null=*/0),
               var = load_channel(args.running_var, channel, /*value_if_null=*/1);
  store_channel(args.running_mean, channel, mean + new_share * (moments.mean - mean));
  store_channel(args.running_var, channel, var + new_share * (unbiased_var - var));
}

struct MeanVariance {
  double mean, variance;
};

MeanVariance load_running_stats(const BnForwardArgs& args, int64_t channel) {
  return {load_channel(args.running_mean, channel, /*value_if_null=*/0),
          load_channel(args.running_var, channel, /*value_if_null=*/1)};
}

// If there are no values (count == 0), the variance is 0. After a failed exchange the count is NaN, and so is
// the variance.
MeanVariance compute_mean_variance(const Moments<double>& moments) {
  return {moments.mean, moments.count == 0 ? 0 : moments.m2 / moments.count};
}

// The parameters of the kernels of bn_reduce and bn_backward, and the constants per channel that both read.
template <class A>
struct BackwardConstants {
  std::vector<A> scale, beta, inverse_gamma;  // [C]
  CpuBnBackwardParams params;

  explicit BackwardConstants(const BnBackwardArgs& args)
      : scale(args.layout.channels),
        beta(args.layout.channels),
        inverse_gamma(args.layout.channels),
        params{args} {
    const int64_t C = args.layout.channels;
    const A* saved = static_cast<const A*>(args.saved);
    for (int64_t c = 0; c < C; ++c) {
      scale[c] = A(load_channel(args.weight, c, /*value_if_null=*/1) * double(saved[C + c]));
      beta[c] = A(load_channel(args.bias, c, /*value_if_null=*/0));
      // In backward only the recovery of xhat from y divides by gamma, so only inverse_gamma takes the
      // floored gamma; scale takes gamma itself.
      inverse_gamma[c] = A(1 / floored_gamma(args, c, args.from_output));
    }
    params.plan = plan_cpu_work(args.layout);
    // No |xhat| of `count` values is larger than sqrt(count - 1).
    params.max_abs_xhat = std::sqrt(std::max(unpack_count(saved + 2 * C) - 1, 0.0));
    params.scale = scale.data(), params.beta = beta.data(), params.inverse_gamma = inverse_gamma.data();
  }
};

}  // namespace

void backend::bn_stats(const BnStatsArgs& args) {
  const WalkLayout& layout = args.layout;
  const int64_t C = layout.channels;
  const CpuPlan plan = plan_cpu_work(layout);
  std::vector<double> slice_moments(plan.slices * 2 * C);
  if (layout.numel() > 0) kernel_table().bn_stats({args, plan, slice_moments.data()});
  dispatch_accumulation(args.dtype, [&]<class A>() {
    A* moments = static_cast<A*>(args.moments);
    double *mean = slice_moments.data(),
           *m2 = mean + C;  // of slice 0, into which the other slices are merged
    for (int64_t slice = 1; slice < plan.slices; ++slice) {
      const int64_t begin = values_before_unit(layout, plan, plan.units * slice / plan.slices),
                    end = values_before_unit(layout, plan, plan.units * (slice + 1) / plan.slices);
      const MergeWeights weights = MergeWeights::from_counts(double(begin), double(end - begin));
      const double *slice_mean = mean + slice * 2 * C, *slice_m2 = slice_mean + C;
      for (int64_t c = 0; c < C; ++c) weights.merge(mean[c], m2[c], slice_mean[c], slice_m2[c]);
    }
    for (int64_t i = 0; i < 2 * C; ++i) moments[i] = A(mean[i]);
    pack_count(moments + 2 * C, double(layout.values_per_channel()));
    // Overwrites this rank's moments with the merged moments of all ranks.
    if (args.exchange) exchange_numbers(*args.exchange, moments, moments, C);
  });
}

// These functions do nothing and return false, which tells the caller to run the reduction and the op
// separately. A CPU kernel has no launch cost, so doing both in one launch would gain nothing.
bool backend::bn_forward_single_launch(const BnForwardArgs&) {
  return false;
}
bool backend::bn_backward_single_launch(const BnBackwardArgs&) {
  return false;
}

// Normalizes by saved_in, which is the `saved` of an earlier forward, else by moments, else by the running
// statistics.
void backend::bn_forward(const BnForwardArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* moments = static_cast<const A*>(args.moments);
    const A* saved_in = static_cast<const A*>(args.saved_in);
    A* saved = static_cast<A*>(args.saved);
    const double count = moments ? unpack_count(moments + 2 * C) : std::numeric_limits<double>::infinity(),
                 new_share = moments ? count_forward(args, count) : 0;
    std::vector<A> mean(C), scale(C), beta(C);
    for (int64_t c = 0; c < C; ++c) {
      A invstd;
      if (saved_in) {
        mean[c] = saved_in[c], invstd = saved_in[C + c];
      } else {
        MeanVariance stats;
        if (moments) {
          const Moments<double> channel_moments{count, moments[c], moments[C + c]};
          update_running_stats(args, c, channel_moments, new_share);
          stats = compute_mean_variance(channel_moments);
        } else {
          stats = load_running_stats(args, c);
        }
        saved[c] = mean[c] = A(stats.mean);
        saved[C + c] = invstd = A(1 / std::sqrt(stats.variance + args.eps));
      }
      scale[c] = A(floored_gamma(args, c, args.invertible) * double(invstd));
      beta[c] = A(load_channel(args.bias, c, /*value_if_null=*/0));
    }
    if (moments) {
      pack_count(saved + 2 * C, count);
    } else if (!saved_in) {  // infinite, so that backward does not clamp |xhat|; pack_count would give NaN
      saved[2 * C] = std::numeric_limits<A>::infinity();
      saved[2 * C + 1] = 0;
    }
    if (args.layout.numel() > 0)
      kernel_table().bn_forward({args, plan_cpu_work(args.layout), mean.data(), scale.data(), beta.data()});
  });
}

void backend::bn_reduce(const BnBackwardArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* invstd = static_cast<const A*>(args.saved) + C;
    A* sums = static_cast<A*>(args.local_sums);
    BackwardConstants<A> constants(args);
    const int64_t slices = constants.params.plan.slices;
    std::vector<double> slice_sums(slices * 2 * C);
    constants.params.slice_sums = slice_sums.data();
    if (args.layout.numel() > 0) kernel_table().bn_reduce(constants.params);
    for (int64_t slice = 1; slice < slices; ++slice)
      for (int64_t i = 0; i < 2 * C; ++i) slice_sums[i] += slice_sums[slice * 2 * C + i];
    const double *sum_dv = slice_sums.data(), *sum_dv_times_factor = sum_dv + C;  // now of all slices
    for (int64_t c = 0; c < C; ++c) {
      sums[c] = A(sum_dv[c]);
      // The kernel multiplied dv by xhat (from_output) or by x - mean.
      sums[C + c] = A(args.from_output ? sum_dv_times_factor[c] : sum_dv_times_factor[c] * double(invstd[c]));
    }
    // Writes the sums over all ranks to sums[2C ... 4C - 1], after the sums of this rank.
    if (args.exchange) exchange_numbers(*args.exchange, sums, sums + 2 * C, C);
  });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  const int64_t C = args.layout.channels;
  if (args.layout.numel() == 0) return;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A *saved = static_cast<const A*>(args.saved), *sums = static_cast<const A*>(args.global_sums);
    const double count = unpack_count(saved + 2 * C);
    // dx = scale * (dv - mean_dv - slope * second_factor), where second_factor is xhat, or x - mean, which is
    // xhat / invstd. mean_dv and slope stay 0 if global_sums is null: the statistics were constants, which
    // have no gradient. They also stay 0 if the count is 0, or NaN after a failed exchange.
    std::vector<A> mean_dv(C), slope(C);
    for (int64_t c = 0; sums && count > 0 && c < C; ++c) {
      mean_dv[c] = A(sums[c] / count);
      slope[c] = A(sums[C + c] / count * (args.from_output ? 1 : double(saved[C + c])));
    }
    BackwardConstants<A> constants(args);
    constants.params.mean_dv = mean_dv.data(), constants.params.slope = slope.data();
    kernel_table().bn_backward(constants.params);
  });
}

}  // namespace fastvit
