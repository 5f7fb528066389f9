// bn_forward, bn_apply, abn_forward, abn_forward_ on the CPU: the O(C) part, in double: running statistics,
// tables.
#include <cmath>
#include <limits>

#include "channels.h"
#include "kernels.h"

namespace fastvit {

// No launch to save on a CPU: two ops run one after the other.
bool Backend::forward_on_chip(const ForwardArgs&) {
  return false;
}

void Backend::forward(const ForwardArgs& args) {
  const int64_t C = args.layout.C;
  dispatch_accumulation(args.dtype, [&]<class A>() {
    const A* moments = static_cast<const A*>(args.moments);
    const A* applied = static_cast<const A*>(args.applied);
    A* saved = static_cast<A*>(args.saved);
    double count = std::numeric_limits<double>::infinity(), factor = args.momentum;
    if (moments) {
      count = load_count(moments + 2 * C);
      if (args.num_batches_tracked && !std::isnan(count)) {
        ++*args.num_batches_tracked;
        if (args.cumulative) factor = 1.0 / double(*args.num_batches_tracked);
      }
    }
    Tables<A> table(3, C);
    for (int64_t c = 0; c < C; ++c) {
      double mean, variance;
      if (applied) {
        mean = applied[c];
        variance = 0;
      } else if (moments) {
        const double m2 = moments[C + c];
        mean = moments[c];
        variance = count == 0 ? 0 : m2 / count;  // NaN after a failed exchange
        if (args.running_mean.data && count > 0) {
          const double unbiased = m2 / std::max(count - 1, 1.0);
          const double old_mean = load_channel(args.running_mean, c, 0),
                       old_var = load_channel(args.running_var, c, 1);
          store_channel(args.running_mean, c, old_mean + factor * (mean - old_mean));
          store_channel(args.running_var, c, old_var + factor * (unbiased - old_var));
        }
      } else {
        mean = load_channel(args.running_mean, c, 0);
        variance = load_channel(args.running_var, c, 1);
      }
      const A invstd = applied ? applied[C + c] : A(1 / std::sqrt(variance + args.eps));
      table[0][c] = A(mean);
      table[1][c] = A(gamma_of(args, c) * double(invstd));
      table[2][c] = A(load_channel(args.bias, c, 0));
      if (!applied) saved[c] = A(mean), saved[C + c] = invstd;
    }
    if (moments) {
      store_count(saved + 2 * C, count);
    } else if (!applied) {
      saved[2 * C] = std::numeric_limits<A>::infinity();
      saved[2 * C + 1] = 0;
    }
    if (args.layout.numel() > 0)
      kernels().forward({args, partition_of(args.layout), table[0], table[1], table[2]});
  });
}

}  // namespace fastvit
