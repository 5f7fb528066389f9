// The ops of batch norm on the CPU: the O(C) part, in double. It merges the slices' results, updates the
// running statistics, exchanges numbers between ranks, and makes the constants of each channel, which kernels
// read.
#include <cmath>
#include <limits>

#include "../moments.h"
#include "../sync/cpu_exchange.h"
#include "channel_vector.h"
#include "kernel_table.h"

namespace fastvit {
namespace {

// Counts the batch; returns the factor of its statistics in the running ones.
double count_batch(const BnForwardArgs& args, double count) {
  if (!args.num_batches_tracked || std::isnan(count)) return args.momentum;
  ++*args.num_batches_tracked;
  return args.cumulative_average ? 1.0 / double(*args.num_batches_tracked) : args.momentum;
}

void update_running(const BnForwardArgs& args, int64_t c, const Moments<double>& batch, double factor) {
  if (!args.running_mean.data || !(batch.count > 0)) return;
  const double unbiased = batch.m2 / std::max(batch.count - 1, 1.0);
  const double mean = load_channel(args.running_mean, c, 0), var = load_channel(args.running_var, c, 1);
  store_channel(args.running_mean, c, mean + factor * (batch.mean - mean));
  store_channel(args.running_var, c, var + factor * (unbiased - var));
}

// The constants of channels that reduce and backward read, and the parameters of their kernels.
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
      scale[c] =
          A(load_channel(args.weight, c, 1) * double(saved[C + c]));  // only the inversion needs a floor
      beta[c] = A(load_channel(args.bias, c, 0));
      inverse_gamma[c] = A(1 / floored_gamma(args, c, args.from_output));
    }
    params.plan = plan_cpu_work(args.layout);
    params.xhat_limit = std::sqrt(std::max(unpack_count(saved + 2 * C) - 1, 0.0));
    params.scale = scale.data(), params.beta = beta.data(), params.inverse_gamma = inverse_gamma.data();
  }
};

}  // namespace

void backend::bn_stats(const BnStatsArgs& args) {
  const WalkLayout& layout = args.layout;
  const int64_t C = layout.channels;
  const CpuPlan plan = plan_cpu_work(layout);
  std::vector<double> partial(plan.slices * 2 * C);
  if (layout.numel() > 0) kernel_table().bn_stats({args, plan, partial.data()});
  dispatch_accumulation(args.dtype, [&]<class A>() {
    A* moments = static_cast<A*>(args.moments);
    double *mean = partial.data(), *m2 = mean + C;  // of the first slice, which the others merge
    for (int64_t s = 1; s < plan.slices; ++s) {
      const int64_t begin = values_before_unit(layout, plan, plan.units * s / plan.slices),
                    end = values_before_unit(layout, plan, plan.units * (s + 1) / plan.slices);
      const MergeWeights weights = MergeWeights::of_counts(double(begin), double(end - begin));
      const double* slice = mean + s * 2 * C;
      for (int64_t c = 0; c < C; ++c) weights.merge(mean[c], m2[c], slice[c], slice[C + c]);
    }
    for (int64_t i = 0; i < 2 * C; ++i) moments[i] = A(mean[i]);
    pack_count(moments + 2 * C, double(layout.values_per_channel()));
    if (args.exchange) exchange_numbers(*args.exchange, moments, moments, C);
  });
}

// Kernels of a CPU have no launch, so one for both passes saves nothing.
bool backend::bn_forward_single_launch(const BnForwardArgs&) {
  return false;
}
bool backend::bn_backward_single_launch(const BnBackwardArgs&) {
  return false;
}

void backend::bn_forward(const BnForwardArgs& args) {
  const int64_t C = args.layout.channels;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* moments = static_cast<const A*>(args.moments);
    const A* saved_in = static_cast<const A*>(args.saved_in);
    A* saved = static_cast<A*>(args.saved);
    const double count = moments ? unpack_count(moments + 2 * C) : std::numeric_limits<double>::infinity(),
                 factor = moments ? count_batch(args, count) : 0;
    std::vector<A> mean(C), scale(C), beta(C);
    for (int64_t c = 0; c < C; ++c) {
      A invstd;
      if (saved_in) {
        mean[c] = saved_in[c], invstd = saved_in[C + c];
      } else {
        double center, variance;
        if (moments) {
          const Moments<double> batch{count, moments[c], moments[C + c]};
          update_running(args, c, batch, factor);
          center = batch.mean;
          variance = count == 0 ? 0 : batch.m2 / count;  // NaN after a failed exchange
        } else {
          center = load_channel(args.running_mean, c, 0);
          variance = load_channel(args.running_var, c, 1);
        }
        saved[c] = mean[c] = A(center);
        saved[C + c] = invstd = A(1 / std::sqrt(variance + args.eps));
      }
      scale[c] = A(floored_gamma(args, c, args.invertible) * double(invstd));
      beta[c] = A(load_channel(args.bias, c, 0));
    }
    if (moments) {
      pack_count(saved + 2 * C, count);
    } else if (!saved_in) {
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
    const A* saved = static_cast<const A*>(args.saved);
    A* sums = static_cast<A*>(args.local_sums);
    BackwardConstants<A> constants(args);
    const int64_t slices = constants.params.plan.slices;
    std::vector<double> partial(slices * 2 * C);
    constants.params.partial = partial.data();
    if (args.layout.numel() > 0) kernel_table().bn_reduce(constants.params);
    for (int64_t s = 1; s < slices; ++s)
      for (int64_t i = 0; i < 2 * C; ++i) partial[i] += partial[s * 2 * C + i];
    for (int64_t c = 0; c < C; ++c) {
      sums[c] = A(partial[c]);
      sums[C + c] = A(args.from_output ? partial[C + c] : partial[C + c] * double(saved[C + c]));
    }
    if (args.exchange) exchange_numbers(*args.exchange, sums, sums + 2 * C, C);
  });
}

void backend::bn_backward(const BnBackwardArgs& args) {
  const int64_t C = args.layout.channels;
  if (args.layout.numel() == 0) return;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A *saved = static_cast<const A*>(args.saved), *sums = static_cast<const A*>(args.global_sums);
    const double count = unpack_count(saved + 2 * C);
    std::vector<A> a(C), b(C);
    for (int64_t c = 0; sums && count > 0 && c < C; ++c) {
      a[c] = A(sums[c] / count);
      b[c] = A(sums[C + c] / count * (args.from_output ? 1 : double(saved[C + c])));
    }
    BackwardConstants<A> constants(args);
    constants.params.a = a.data(), constants.params.b = b.data();
    kernel_table().bn_backward(constants.params);
  });
}

}  // namespace fastvit
