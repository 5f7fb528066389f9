// layer_norm_backward: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma; and for each
// column sum dy and sum dy * xhat.
// Memory   reads x and dy once; writes dx, and two numbers per block and column. Bandwidth-bound.
// Mapping  a team of lanes per row, see layer_norm.cuh; blocks stay, and keep the weight in shared memory.
//          A lane keeps the sums of its columns from row to row; teams merge them in shared memory. A second
//          kernel adds the sums of the blocks: a block takes 8 columns, a sector of each row, and each of its
//          threads 16 rows at a time.
// Numerics fp32 (fp64 for double). Shapes and device fix the order of the sums; no atomics.
// Source   Ba, Kiros, Hinton, arXiv:1607.06450.
#include "launch_memory.h"
#include "layer_norm.cuh"

namespace fastvit {

template <class A>
struct LayerNormBackwardParams : LayerNormArgs {
  RowPlan plan;
  A* partial;  // [blocks][2][columns]; null: no sums
};

// 24 columns of half take more registers than two blocks leave.
template <>
constexpr int kBackwardColumns<__half>[2] = {16, 16};

template <class T, class Y, int V, int K>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) layer_norm_backward_kernel(
    const __grid_constant__ KernelParams<LayerNormBackwardParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  using A = Accumulation<T>;
  const RowPlan& plan = args.plan;
  const TeamMember<V, K> mine(plan);
  const A n = A(plan.columns);
  A bias_sums[K][V] = {}, weight_sums[K][V] = {};
  // Of a row in several parts there is one team, and a column's sums belong to one thread, in `partial`.
  A* const bias_own = args.partial ? args.partial + 2 * blockIdx.x * plan.columns : nullptr;
  A* const weight_own = args.partial ? bias_own + plan.columns : nullptr;
  for (int part = 0; args.partial && plan.parts > 1 && part < plan.parts; ++part)
    mine.each(part, [&](int, int column) {
#pragma unroll
      for (int k = 0; k < V; ++k) bias_own[column + k] = weight_own[column + k] = 0;
    });

  const A* const saved = static_cast<const A*>(args.saved);
  Vector<T, V> x[K];
  Vector<Y, V> dy[K];
  A mean, invstd;
  const auto load = [&](int64_t row, int part) {
    const bool exists = row < plan.rows;
    mean = exists ? saved[row] : A(0), invstd = exists ? saved[plan.rows + row] : A(0);
    const int64_t begin = row * plan.columns;
    mine.each(part, [&](int j, int column) {
      x[j].clear(), dy[j].clear();
      if (exists) {
        x[j].load(static_cast<const T*>(args.x) + begin + column);
        dy[j].load(static_cast<const Y*>(args.dy) + begin + column);
      }
    });
  };
  const int step = int(gridDim.x) * plan.teams();
  int64_t first = int64_t(blockIdx.x) * plan.teams();
  load(first + mine.team, 0);
  FASTVIT_DYNAMIC_SHARED(shared);
  const ColumnTable<A, V> gamma(args.weight, 1, shared, 0, plan);
  gamma.fill();
  __syncthreads();

  for (; first < plan.rows; first += step) {
    const int64_t row = first + mine.team;
    const bool exists = row < plan.rows;
    // The next row's memory answers while this row is summed; registers for it would be too many.
    if (plan.parts == 1 && row + step < plan.rows)
      mine.each(0, [&](int, int column) {
        const int64_t at = (row + step) * plan.columns + column;
        prefetch(static_cast<const T*>(args.x) + at);
        prefetch(static_cast<const Y*>(args.dy) + at);
      });
    // f(j, column, x, dy, gamma) for the vectors of the row.
    const auto pass = [&](const auto& f) {
      for (int part = 0; part < plan.parts; ++part) {
        if (plan.parts > 1) load(row, part);
        mine.each(part, [&](int j, int column) {
          A v[V], g[V], scale[V];
          x[j].unpack(v), dy[j].unpack(g), gamma.get(column, scale);
          f(j, column, v, g, scale);
        });
      }
    };

    A sums[2] = {0, 0};  // of g and g * xhat
    pass([&](int j, int column, const A(&v)[V], const A(&g)[V], const A(&scale)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A xhat = (v[k] - mean) * invstd, weighted = g[k] * scale[k];
        sums[0] += weighted;
        sums[1] = fma_rn(weighted, xhat, sums[1]);
        if (plan.parts == 1) {
          bias_sums[j][k] += g[k];
          weight_sums[j][k] = fma_rn(g[k], xhat, weight_sums[j][k]);
        } else if (args.partial) {
          bias_own[column + k] += g[k];
          weight_own[column + k] = fma_rn(g[k], xhat, weight_own[column + k]);
        }
      }
    });
    sum_over_team(sums, mine.lanes);
    const A a = sums[0] / n, b = sums[1] / n;
    pass([&](int j, int column, A(&v)[V], const A(&g)[V], const A(&scale)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A xhat = (v[k] - mean) * invstd;
        v[k] = fma_rn(-xhat, b, fma_rn(g[k], scale[k], -a)) * invstd;
      }
      x[j].pack(v);
      if (exists) x[j].store(static_cast<T*>(args.dx) + row * plan.columns + column);
    });
    if (plan.parts == 1) load(row + step, 0);
  }

  if (!args.partial || plan.parts > 1) return;
  A* const merged = reinterpret_cast<A*>(shared);  // [teams][columns of a team]
  const int width = mine.lanes * K * V;
  const auto merge = [&](const A(&own)[K][V], A* to) {
    __syncthreads();
    mine.each(0, [&](int j, int column) {
#pragma unroll
      for (int k = 0; k < V; ++k) merged[mine.team * width + column + k] = own[j][k];
    });
    __syncthreads();
    for (int column = int(threadIdx.x); column < plan.columns; column += kThreads) {
      A sum = 0;
      for (int team = 0; team < plan.teams(); ++team) sum += merged[team * width + column];
      to[column] = sum;
    }
  };
  merge(bias_sums, bias_own);
  merge(weight_sums, weight_own);
}

constexpr int kSumColumns = 8;  // of a block that adds rows
constexpr int kSumAhead = 16;   // rows of a thread in flight: a column's 32 threads add 512 rows in one turn

template <class A>
struct SumRowsParams {
  const A* rows;
  A* sums;
  int64_t count, columns;
};

template <class A>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    sum_rows_kernel(const __grid_constant__ KernelParams<SumRowsParams<A>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();
  constexpr int kWarps = kThreads / 32, kRows = kThreads / kSumColumns;
  __shared__ A merged[kWarps][kSumColumns];
  const int at = int(threadIdx.x) % kSumColumns;
  const int64_t column = int64_t(blockIdx.x) * kSumColumns + at;
  A sum = 0;
  for (int64_t first = int(threadIdx.x) / kSumColumns; first < args.count; first += kRows * kSumAhead) {
    A ahead[kSumAhead];
#pragma unroll
    for (int k = 0; k < kSumAhead; ++k) {
      const int64_t row = first + k * kRows;
      ahead[k] = row < args.count && column < args.columns ? args.rows[row * args.columns + column] : A(0);
    }
#pragma unroll
    for (int k = 0; k < kSumAhead; ++k) sum += ahead[k];
  }
  for (int offset = kSumColumns; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 < kSumColumns) merged[threadIdx.x / 32][at] = sum;
  __syncthreads();
  if (int(threadIdx.x) >= kSumColumns || column >= args.columns) return;
  for (int w = 1; w < kWarps; ++w) sum += merged[w][at];
  args.sums[column] = sum;
}

void backend::layer_norm_backward(const LayerNormArgs& args) {
  const LaunchContext context(args.device);
  const int64_t numbers = 2 * args.columns;
  dispatch_layer_norm_types<__half, __nv_bfloat16>(args.dtype, args.output_dtype, [&]<class T, class Y>() {
    using A = Accumulation<T>;
    if (args.rows == 0) {
      if (args.sums) STD_CUDA_CHECK(cudaMemsetAsync(args.sums, 0, numbers * sizeof(A), context.stream));
      return;
    }
    const std::initializer_list<const void*> pointers = {args.x, args.dy, args.dx};
    dispatch_row_plan<T, Y, kBackwardColumns<T>>(
        args.rows, args.columns, pointers, [&]<int V, int K>(const RowPlan& plan) {
          const auto kernel = layer_norm_backward_kernel<T, Y, V, K>;
          const LaunchConfig config =
              row_launch(context, kernel, plan, std::max(table_bytes<A>(plan), kThreads * K * V * sizeof(A)));
          const Scratch partial(args.sums ? config.blocks * numbers * sizeof(A) : 0);
          const LayerNormBackwardParams<A> params{{args}, plan, static_cast<A*>(partial.data)};
          STD_CUDA_CHECK(launch(kernel, config, params));
          if (!args.sums) return;
          const SumRowsParams<A> sums{params.partial, static_cast<A*>(args.sums), config.blocks, numbers};
          const int64_t blocks = ceil_div(numbers, kSumColumns);
          STD_CUDA_CHECK(launch(sum_rows_kernel<A>, {blocks, context}, sums));
        });
  });
}

}  // namespace fastvit
