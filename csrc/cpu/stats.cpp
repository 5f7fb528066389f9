// bn_stats on the CPU: the O(C) part, in double, which merges the slices' moments.
#include "../moments.h"
#include "../sync/cpu_peer.h"
#include "channels.h"
#include "kernels.h"

namespace fastvit {

void Backend::stats(const StatsArgs& args) {
  const Layout& layout = args.layout;
  const int64_t C = layout.C;
  const Partition partition = partition_of(layout);
  std::vector<double> partial(partition.slices * 2 * C);
  if (layout.numel() > 0) kernels().stats({args, partition, partial.data()});
  dispatch_accumulation(args.dtype, [&]<class A>() {
    A* moments = static_cast<A*>(args.moments);
    double *mean = partial.data(), *m2 = mean + C;  // of the first slice, which the others merge
    for (int64_t s = 1; s < partition.slices; ++s) {
      const int64_t begin = values_before(layout, partition, partition.steps * s / partition.slices),
                    end = values_before(layout, partition, partition.steps * (s + 1) / partition.slices);
      const ChanWeights weights = ChanWeights::of(double(begin), double(end - begin));
      const double* slice = mean + s * 2 * C;
      for (int64_t c = 0; c < C; ++c) weights.merge(mean[c], m2[c], slice[c], slice[C + c]);
    }
    for (int64_t i = 0; i < 2 * C; ++i) moments[i] = A(mean[i]);
    store_count(moments + 2 * C, double(layout.count()));
    if (args.exchange) share(*args.exchange, moments, moments, C);
  });
}

}  // namespace fastvit
