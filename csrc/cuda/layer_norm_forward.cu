// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row, in the dtype of y.
// Memory   reads x once; writes y, and two numbers per row. It can write 16 bits from a float32 x, so that
//          autocast does not cast y. Bandwidth-bound.
// Mapping  a team of lanes per row, see layer_norm.cuh; weight and bias stay in registers from row to row.
// Numerics fp32 (fp64 for double): the mean, then deviations from it, whose sum corrects it.
// Source   Ba, Kiros, Hinton, arXiv:1607.06450.
#include "layer_norm.cuh"

namespace fastvit {

// Before sm_90 a result narrower than x takes more registers than three blocks leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kNarrowingSpills = true;
#else
constexpr bool kNarrowingSpills = false;
#endif

// Blocks of a multiprocessor: with two, a row of 384 float32 would leave too few packets in flight.
template <class T, class G>
constexpr int kForwardResident =
    sizeof(T) == 8 || (kNarrowingSpills && sizeof(G) < sizeof(T)) ? kResident : kResident + 1;

template <class T, class G>
struct LayerNormForwardParams {
  using A = Accumulation<T>;
  RowPlan plan;
  const T* x;
  G* y;
  ChannelArray weight, bias;
  A* saved;
  A eps;
};

template <class T, class G, int V>
__global__ void __launch_bounds__(kThreads, kForwardResident<T, G>)
    layer_norm_forward_kernel(const __grid_constant__ LayerNormForwardParams<T, G> args) {
  using A = Accumulation<T>;
  constexpr int K = kPackets<A, V>;
  const RowPlan& plan = args.plan;
  const RowLane<V, K> mine(plan);
  const A n = A(plan.columns);
  ColumnTable<A, V, K> gamma, beta;
  const auto load_table = [&](int part) {
    gamma.load(mine, part, args.weight, A(1));
    beta.load(mine, part, args.bias, A(0));
  };
  if (plan.parts == 1) load_table(0);

  for (int64_t first = int64_t(blockIdx.x) * plan.teams(); first < plan.rows;
       first += int64_t(gridDim.x) * plan.teams()) {
    const int64_t row = first + mine.team;
    const bool exists = row < plan.rows;
    const T* const x = args.x + row * plan.columns;
    Packet<T, V> packets[K];
    const auto load = [&](int part) {
      mine.each(part, [&](int j, int64_t column) {
        packets[j].clear();
        if (exists) packets[j].load(x + column);
      });
    };
    // f(values) for the packets of the row.
    const auto pass = [&](bool first, const auto& f) {
      for (int part = 0; part < plan.parts; ++part) {
        if (first || plan.parts > 1) load(part);
        mine.each(part, [&](int j, int64_t) {
          A v[V];
          packets[j].unpack(v);
          f(v);
        });
      }
    };

    A sum[1] = {0};
    pass(true, [&](const A(&v)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum[0] += v[k];
    });
    sum_team(sum, mine.lanes);
    A mean = sum[0] / n;
    A centred[2] = {0, 0};
    pass(false, [&](const A(&v)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A d = v[k] - mean;
        centred[0] += d;
        centred[1] = fused(d, d, centred[1]);
      }
    });
    sum_team(centred, mine.lanes);
    const A correction = centred[0] / n;
    mean += correction;
    const A invstd = A(1) / std::sqrt((centred[1] - centred[0] * correction) / n + args.eps);
    if (exists && mine.lane == 0) {
      args.saved[row] = mean;
      args.saved[plan.rows + row] = invstd;
    }
    G* const y = args.y + row * plan.columns;
    for (int part = 0; part < plan.parts; ++part) {
      if (plan.parts > 1) load(part), load_table(part);
      mine.each(part, [&](int j, int64_t column) {
        A v[V];
        packets[j].unpack(v);
#pragma unroll
        for (int k = 0; k < V; ++k) v[k] = fused((v[k] - mean) * invstd, gamma.at[j][k], beta.at[j][k]);
        Packet<G, V> out;
        out.pack(v);
        if (exists) out.store(y + column);
      });
    }
  }
}

void Cuda::layer_norm_forward(const LayerNormForwardArgs& args) {
  const Device device(args.device);
  if (args.rows == 0) return;
  with_row_types(args.dtype, args.output_dtype, [&]<class T, class G>() {
    using A = Accumulation<T>;
    with_row_width<T, G>(args.columns, {args.x, args.y}, [&]<int V>() {
      const auto kernel = layer_norm_forward_kernel<T, G, V>;
      const LayerNormForwardParams<T, G> params{row_plan<A, V>(args.rows, args.columns),
                                                static_cast<const T*>(args.x),
                                                static_cast<G*>(args.y),
                                                per_channel(args.weight),
                                                per_channel(args.bias),
                                                static_cast<A*>(args.saved),
                                                A(args.eps)};
      STD_CUDA_CHECK(launch(kernel, {row_blocks(device, kernel, params.plan), device.stream}, params));
    });
  });
}

}  // namespace fastvit
