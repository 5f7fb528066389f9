// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row, in the dtype of y.
// Memory   reads x once; writes y, and two numbers per row. It can write 16 bits from a float32 x, so that
//          autocast does not cast y. Bandwidth-bound.
// Mapping  a team of lanes per row, see layer_norm.cuh; blocks stay, and keep weight and bias in shared
//          memory. The first row is loaded before weight and bias.
// Numerics fp32 (fp64 for double): the mean, then deviations from it, whose sum corrects it.
// Source   Ba, Kiros, Hinton, arXiv:1607.06450.
#include "layer_norm.cuh"

namespace fastvit {

struct LayerNormForwardParams : LayerNormArgs {
  RowPlan plan;
};

// Blocks of a multiprocessor, which hide each other's latency. Values of half take more registers.
template <class T>
constexpr int kForwardBlocks = (std::is_same_v<T, __half> ? 2 : 3) + kOneMoreBlockOnSm90;

template <class T, class Y, int V, int K>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T>)
    layer_norm_forward_kernel(const __grid_constant__ KernelParams<LayerNormForwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  const RowPlan& plan = args.plan;
  const T* const x = static_cast<const T*>(args.x);
  Y* const y = static_cast<Y*>(args.y);
  A* const saved = static_cast<A*>(args.saved);
  const TeamMember<V, K> mine(plan);
  const A n = A(plan.columns);
  Vector<T, V> vectors[K];
  const auto load = [&](int64_t row, int part) {
    mine.each(part, [&](int j, int column) {
      vectors[j].clear();
      if (row < plan.rows) vectors[j].load(x + row * plan.columns + column);
    });
  };
  const int64_t step = int64_t(gridDim.x) * plan.teams();
  int64_t first = int64_t(blockIdx.x) * plan.teams();
  if (plan.parts == 1) load(first + mine.team, 0);

  FASTVIT_DYNAMIC_SHARED(shared);
  const ColumnTable<A, V> gamma(args.weight, 1, shared, 0, plan), beta(args.bias, 0, shared, 1, plan);
  gamma.fill();
  beta.fill();
  __syncthreads();

  for (; first < plan.rows; first += step) {
    const int64_t row = first + mine.team;
    const bool exists = row < plan.rows;
    // f(values) for the vectors of the row.
    const auto pass = [&](const auto& f) {
      for (int part = 0; part < plan.parts; ++part) {
        if (plan.parts > 1) load(row, part);
        mine.each(part, [&](int j, int column) {
          A v[V];
          vectors[j].unpack(v);
          f(v, column);
        });
      }
    };

    A sum[1] = {0};
    pass([&](const A(&v)[V], int) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum[0] += v[k];
    });
    sum_over_team(sum, mine.lanes);
    A mean = sum[0] / n;
    A centred[2] = {0, 0};
    pass([&](const A(&v)[V], int) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A d = v[k] - mean;
        centred[0] += d;
        centred[1] = fma_rn(d, d, centred[1]);
      }
    });
    sum_over_team(centred, mine.lanes);
    const A correction = centred[0] / n;
    mean += correction;
    const A invstd = A(1) / std::sqrt((centred[1] - centred[0] * correction) / n + A(args.eps));
    if (exists && mine.lane == 0) {
      saved[row] = mean;
      saved[plan.rows + row] = invstd;
    }
    pass([&](A(&v)[V], int column) {
      A scale[V], shift[V];
      gamma.get(column, scale), beta.get(column, shift);
#pragma unroll
      for (int k = 0; k < V; ++k) v[k] = fma_rn((v[k] - mean) * invstd, scale[k], shift[k]);
      Vector<Y, V> out;
      out.pack(v);
      if (exists) out.store(y + row * plan.columns + column);
    });
    if (plan.parts == 1) load(row + step, 0);
  }
}

void backend::layer_norm_forward(const LayerNormArgs& args) {
  const LaunchContext context(args.device);
  if (args.rows == 0) return;
  dispatch_layer_norm_types<__half, __nv_bfloat16>(args.dtype, args.output_dtype, [&]<class T, class Y>() {
    using A = Accumulation<T>;
    dispatch_row_plan<T, Y, kForwardColumns>(
        args.rows, args.columns, {args.x, args.y}, [&]<int V, int K>(const RowPlan& plan) {
          const auto kernel = layer_norm_forward_kernel<T, Y, V, K>;
          STD_CUDA_CHECK(launch(kernel, row_launch(context, kernel, plan, 2 * table_bytes<A>(plan)),
                                LayerNormForwardParams{{args}, plan}));
        });
  });
}

}  // namespace fastvit
