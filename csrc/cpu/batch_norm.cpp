// The ops of batch norm on the CPU: the O(C) part, in double. It merges the results of slices (parts of each
// channel's values, which a kernel reduces separately), updates the running statistics, exchanges numbers
// between ranks, and computes the constants per channel that the kernels read.
//
// A is the accumulation type: double for tensors of double, else float. xhat is (x - mean) * invstd, dv is
// the gradient of the activation's input. A count is stored as two numbers (pack_count), so that a large
// count is exact in float. saved: mean[C], invstd[C], count. With rows, a unit is a row. With planes, a unit
// is the same segment of the planes of all channels, at one index of the outer dimensions.
//
// The functions that take a CpuPlan process its channels, and read and write no number of another channel.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../moments.h"
#include "../sync/cpu_exchange.h"
#include "cache_tiles.h"
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

// An op's arguments for the kernel, whose layout has the plan's channels alone.
template <class Args>
Args select_channels(Args args, const CpuPlan& plan) {
  args.layout.channels = plan.channels;
  return args;
}

// The parameters of the kernels of bn_reduce and bn_backward, and the constants per channel that both read.
template <class A>
struct BackwardConstants {
  std::vector<A> scale, beta, inverse_gamma;  // [plan.channels]
  CpuBnBackwardParams params;

  BackwardConstants(const BnBackwardArgs& args, const CpuPlan& plan)
      : scale(plan.channels),
        beta(plan.channels),
        inverse_gamma(plan.channels),
        params{select_channels(args, plan), plan} {
    const int64_t C = args.layout.channels;
    const A* saved = static_cast<const A*>(args.saved);
    for (int64_t i = 0; i < plan.channels; ++i) {
      const int64_t c = plan.first_channel + i;
      scale[i] = A(load_channel(args.weight, c, /*value_if_null=*/1) * double(saved[C + c]));
      beta[i] = A(load_channel(args.bias, c, /*value_if_null=*/0));
      // In backward only the recovery of xhat from y divides by gamma, so only inverse_gamma takes the
      // floored gamma; scale takes gamma itself.
      inverse_gamma[i] = A(1 / floored_gamma(args, c, args.from_output));
    }
    params.mean = saved + plan.first_channel;
    // No |xhat| of `count` values is larger than sqrt(count - 1).
    params.max_abs_xhat = std::sqrt(std::max(unpack_count(saved + 2 * C) - 1, 0.0));
    params.scale = scale.data(), params.beta = beta.data(), params.inverse_gamma = inverse_gamma.data();
  }
};

// Writes mean and M2 to args.moments, but not the count.
template <class A>
void compute_moments(const BnStatsArgs& args, const CpuPlan& plan) {
  const int64_t C = args.layout.channels, channels = plan.channels;
  std::vector<double> slice_moments(plan.slices * 2 * channels);
  if (args.layout.numel() > 0)
    kernel_table().bn_stats({select_channels(args, plan), plan, slice_moments.data()});
  double *mean = slice_moments.data(),
         *m2 = mean + channels;  // of slice 0, into which the other slices are merged
  for (int64_t slice = 1; slice < plan.slices; ++slice) {
    const int64_t begin = values_before_unit(args.layout, plan, plan.first_unit(slice)),
                  end = values_before_unit(args.layout, plan, plan.first_unit(slice + 1));
    const MergeWeights weights = MergeWeights::from_counts(double(begin), double(end - begin));
    const double *slice_mean = mean + slice * 2 * channels, *slice_m2 = slice_mean + channels;
    for (int64_t i = 0; i < channels; ++i) weights.merge(mean[i], m2[i], slice_mean[i], slice_m2[i]);
  }
  A* const moments = static_cast<A*>(args.moments) + plan.first_channel;
  for (int64_t i = 0; i < channels; ++i) moments[i] = A(mean[i]), moments[C + i] = A(m2[i]);
}

// Normalizes by saved_in, which is the `saved` of an earlier forward, else by moments, else by the running
// statistics. Writes mean and invstd to args.saved, but not the count. new_share: the share of the moments in
// the new running statistics.
template <class A>
void normalize(const BnForwardArgs& args, const CpuPlan& plan, double count, double new_share) {
  const int64_t C = args.layout.channels;
  const A* moments = static_cast<const A*>(args.moments);
  const A* saved_in = static_cast<const A*>(args.saved_in);
  A* saved = static_cast<A*>(args.saved);
  std::vector<A> mean(plan.channels), scale(plan.channels), beta(plan.channels);
  for (int64_t i = 0; i < plan.channels; ++i) {
    const int64_t c = plan.first_channel + i;
    A invstd;
    if (saved_in) {
      mean[i] = saved_in[c], invstd = saved_in[C + c];
    } else {
      MeanVariance stats;
      if (moments) {
        const Moments<double> channel_moments{count, moments[c], moments[C + c]};
        update_running_stats(args, c, channel_moments, new_share);
        stats = compute_mean_variance(channel_moments);
      } else {
        stats = load_running_stats(args, c);
      }
      saved[c] = mean[i] = A(stats.mean);
      saved[C + c] = invstd = A(1 / std::sqrt(stats.variance + args.eps));
    }
    scale[i] = A(floored_gamma(args, c, args.invertible) * double(invstd));
    beta[i] = A(load_channel(args.bias, c, /*value_if_null=*/0));
  }
  if (args.layout.numel() > 0)
    kernel_table().bn_forward({select_channels(args, plan), plan, mean.data(), scale.data(), beta.data()});
}

// Writes the sums to args.local_sums. dv: null, or where the kernel stores dv.
template <class A>
void compute_sums(const BnBackwardArgs& args, const CpuPlan& plan, void* dv = nullptr) {
  const int64_t C = args.layout.channels, channels = plan.channels;
  const A* invstd = static_cast<const A*>(args.saved) + C + plan.first_channel;
  A* sums = static_cast<A*>(args.local_sums) + plan.first_channel;
  BackwardConstants<A> constants(args, plan);
  std::vector<double> slice_sums(plan.slices * 2 * channels);
  constants.params.slice_sums = slice_sums.data();
  constants.params.dv = dv;
  if (args.layout.numel() > 0) kernel_table().bn_reduce(constants.params);
  for (int64_t slice = 1; slice < plan.slices; ++slice)
    for (int64_t i = 0; i < 2 * channels; ++i) slice_sums[i] += slice_sums[slice * 2 * channels + i];
  const double *sum_dv = slice_sums.data(), *sum_dv_times_factor = sum_dv + channels;  // now of all slices
  for (int64_t i = 0; i < channels; ++i) {
    sums[i] = A(sum_dv[i]);
    // The kernel multiplied dv by xhat (from_output) or by x - mean.
    sums[C + i] = A(args.from_output ? sum_dv_times_factor[i] : sum_dv_times_factor[i] * double(invstd[i]));
  }
}

template <class A>
void compute_gradients(const BnBackwardArgs& args, const CpuPlan& plan) {
  const int64_t C = args.layout.channels;
  const A *saved = static_cast<const A*>(args.saved), *sums = static_cast<const A*>(args.global_sums);
  const double count = unpack_count(saved + 2 * C);
  // dx = scale * (dv - mean_dv - slope * second_factor), where second_factor is xhat, or x - mean, which is
  // xhat / invstd. mean_dv and slope stay 0 if global_sums is null: the statistics were constants, which have
  // no gradient. They also stay 0 if the count is 0, or NaN after a failed exchange.
  std::vector<A> mean_dv(plan.channels), slope(plan.channels);
  for (int64_t i = 0; sums && count > 0 && i < plan.channels; ++i) {
    const int64_t c = plan.first_channel + i;
    mean_dv[i] = A(sums[c] / count);
    slope[i] = A(sums[C + c] / count * (args.from_output ? 1 : double(saved[C + c])));
  }
  BackwardConstants<A> constants(args, plan);
  constants.params.mean_dv = mean_dv.data(), constants.params.slope = slope.data();
  kernel_table().bn_backward(constants.params);
}

// Returns where the first pass of a backward stores dv for the second pass: in dresidual, or without a
// residual in dx. For a transcendental activation that takes less time than computing dv again, unless
// tensors leave the caches and dx has to be written twice. Returns null where dv is not stored: it must be
// storable without a rounding, and lie in memory as the input does, without gaps in a span. Of an input y
// the second pass would still compute the inverse.
void* find_place_of_dv(const BnBackwardArgs& args, const CacheTiles& tiles) {
  const int64_t bytes = args.layout.numel() * (args.dtype == ScalarType::Double ? 8 : 4);
  if (!is_transcendental(args.activation) || args.from_output ||
      accumulation_type(args.dtype) != args.dtype ||
      !(args.dresidual || tiles.count > 1 || bytes < kMinBytesPastCache))
    return nullptr;
  using Index = BackwardOperandIndex;
  const Strides &input = args.layout.strides[Index::input],
                &dv = args.layout.strides[args.dresidual ? Index::dresidual : Index::dx];
  const bool lies_as_input = (args.layout.is_rows ? input.channel : input.inner) == 1 &&
                             input.channel == dv.channel && input.inner == dv.inner &&
                             std::equal(input.outer, input.outer + kMaxOuterDims, dv.outer);
  return !lies_as_input ? nullptr : args.dresidual ? args.dresidual : args.dx;
}

// Does what bn_reduce and bn_backward do, for the plan's channels. dv: null, or find_place_of_dv.
template <class A>
void compute_sums_and_gradients(const BnBackwardArgs& args, const CpuPlan& plan, void* dv) {
  using Index = BackwardOperandIndex;
  const Strides* const strides = args.layout.strides;
  BnBackwardArgs reduce_args = args;  // input and dy have the same indices in both ops
  reduce_args.layout.strides[ReduceOperandIndex::residual] = strides[Index::residual];
  compute_sums<A>(reduce_args, plan, dv);

  BnBackwardArgs gradient_args = args;
  gradient_args.global_sums = args.local_sums;
  if (dv) {  // from dv on, this is the backward of a norm without activation and residual
    gradient_args.activation = Activation::identity;
    gradient_args.residual = gradient_args.dresidual = nullptr;
    gradient_args.dy = dv;
    gradient_args.layout.strides[Index::dy] = strides[Index::input];
  }
  compute_gradients<A>(gradient_args, plan);
}

}  // namespace

void backend::bn_stats(const BnStatsArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    A* moments = static_cast<A*>(args.moments);
    compute_moments<A>(args, plan_cpu_work(args.layout));
    pack_count(moments + 2 * C, double(args.layout.values_per_channel()));
    // Overwrites this rank's moments with the merged moments of all ranks.
    if (args.exchange) exchange_numbers(*args.exchange, moments, moments, C);
  });
}

void backend::bn_forward(const BnForwardArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* moments = static_cast<const A*>(args.moments);
    A* saved = static_cast<A*>(args.saved);
    const double count = moments ? unpack_count(moments + 2 * C) : std::numeric_limits<double>::infinity(),
                 new_share = moments ? count_forward(args, count) : 0;
    normalize<A>(args, plan_cpu_work(args.layout), count, new_share);
    if (moments) {
      pack_count(saved + 2 * C, count);
    } else if (saved) {  // infinite, so that backward does not clamp |xhat|; pack_count would give NaN
      saved[2 * C] = std::numeric_limits<A>::infinity();
      saved[2 * C + 1] = 0;
    }
  });
}

// On a CPU a "single launch" makes both passes over one cache tile after another. A tile has the slices of
// the whole call, so the moments have the bits of bn_stats.
bool backend::bn_forward_single_launch(const BnForwardArgs& args) {
  const CacheTiles tiles(args.layout, args.dtype, /*reduced_operands=*/1);
  if (tiles.count == 1) return false;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const int64_t C = args.layout.channels;
    const double count = double(args.layout.values_per_channel()), new_share = count_forward(args, count);
    std::vector<A> moments(2 * C);
    BnForwardArgs forward_args = args;
    forward_args.moments = moments.data();
    tiles.for_each([&](const CpuPlan& plan) {
      compute_moments<A>({args.layout, args.dtype, args.device, args.x, moments.data(), /*exchange=*/nullptr},
                         plan);
      normalize<A>(forward_args, plan, count, new_share);
    });
    pack_count(static_cast<A*>(args.saved) + 2 * C, count);
  });
  return true;
}

void backend::bn_reduce(const BnBackwardArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    A* sums = static_cast<A*>(args.local_sums);
    compute_sums<A>(args, plan_cpu_work(args.layout));
    // Writes the sums over all ranks to sums[2C ... 4C - 1], after the sums of this rank.
    if (args.exchange) exchange_numbers(*args.exchange, sums, sums + 2 * C, C);
  });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  if (args.layout.numel() == 0) return;
  dispatch_accumulation(args.dtype,
                        [&]<class A>() { compute_gradients<A>(args, plan_cpu_work(args.layout)); });
}

// Makes both passes over one cache tile after another. A single tile gains too, if the first pass stores dv.
bool backend::bn_backward_single_launch(const BnBackwardArgs& args) {
  if (args.layout.numel() == 0) return false;
  const CacheTiles tiles(args.layout, args.dtype, /*reduced_operands=*/args.residual ? 3 : 2);
  void* const dv = find_place_of_dv(args, tiles);
  if (tiles.count == 1 && !dv) return false;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    tiles.for_each([&](const CpuPlan& plan) { compute_sums_and_gradients<A>(args, plan, dv); });
  });
  return true;
}

}  // namespace fastvit
