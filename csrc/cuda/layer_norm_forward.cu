// layer_norm_forward: y = (x - mean) * invstd * gamma + beta for each row.
//
// Memory:   reads x once, or three times if rows take several passes; writes y, and two numbers per row for
//           backward. y may have 16 bits if x is float, so that autocast needs no cast. Bound by bandwidth.
// Mapping:  a team of threads takes a row, see layer_norm.cuh. A block takes rows until none is left. If rows
//           take one pass, it loads its first rows, and then weight and bias into shared memory.
// Numerics: float (double for double). A first mean is corrected by the mean of the deviations from it.
// Source:   Ba, Kiros, Hinton, arXiv:1607.06450.
#include "layer_norm.cuh"

namespace fastvit {

struct LayerNormForwardParams : LayerNormArgs {
  RowPlan plan;
};

// Launch bound: the number of blocks that share a multiprocessor and hide each other's latency. It is lower
// for __half, which takes more registers.
template <class T>
constexpr int kForwardBlocks = (std::is_same_v<T, __half> ? 2 : 3) + kExtraBlocksOnSm90;

// T: type of x. Y: type of y. V: elements of a vector: as many as 16 bytes of the larger type hold, or one.
// K: vectors of a row that a thread has in registers. A thread without a row takes part in sum_over_team too.
//
// Kept in one function: its parts would all need the vectors in registers, and a split changes how the
// compiler unrolls the loops over a row.
template <class T, class Y, int V, int K>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<T>)
    layer_norm_forward_kernel(const __grid_constant__ KernelParams<LayerNormForwardParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  const RowPlan& plan = args.plan;
  const T* const x = static_cast<const T*>(args.x);
  Y* const y = static_cast<Y*>(args.y);
  A* const saved = static_cast<A*>(args.saved);
  const TeamMember<V, K> member(plan);
  const A n = A(plan.columns);
  Vector<T, V> x_vectors[K];
  const auto load = [&](int64_t row, int pass) {
    member.for_each_vector(pass, [&](int j, int column) {
      x_vectors[j].clear();
      if (row < plan.rows) x_vectors[j].load(x + row * plan.columns + column);
    });
  };
  const int64_t row_step = int64_t(gridDim.x) * plan.teams();
  int64_t first_row = int64_t(blockIdx.x) * plan.teams();
  if (plan.passes == 1) load(first_row + member.team, /*pass=*/0);

  FASTVIT_DYNAMIC_SHARED(shared);  // declares the launch's dynamic shared memory
  const ColumnTable<A, V> gamma(args.weight, /*default_value=*/1, shared, /*table_index=*/0, plan);
  const ColumnTable<A, V> beta(args.bias, /*default_value=*/0, shared, /*table_index=*/1, plan);
  gamma.fill();
  beta.fill();
  __syncthreads();

  for (; first_row < plan.rows; first_row += row_step) {
    const int64_t row = first_row + member.team;
    const bool has_row = row < plan.rows;  // false for the last teams in the block's last turn
    // Calls f(values, column) for this thread's vectors of the row in all passes.
    const auto for_each_vector_of_row = [&](const auto& f) {
      for (int pass = 0; pass < plan.passes; ++pass) {
        if (plan.passes > 1) load(row, pass);
        member.for_each_vector(pass, [&](int j, int column) {
          A values[V];
          x_vectors[j].unpack(values);
          f(values, column);
        });
      }
    };

    A sum[1] = {0};
    for_each_vector_of_row([&](const A(&values)[V], int) {
#pragma unroll
      for (int k = 0; k < V; ++k) sum[0] += values[k];
    });
    sum_over_team(sum, member.team_size);
    A mean = sum[0] / n;
    A deviations[2] = {0, 0};  // sums of the deviations from the mean, and of their squares
    for_each_vector_of_row([&](const A(&values)[V], int) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A deviation = values[k] - mean;
        deviations[0] += deviation;
        deviations[1] = fma_rn(deviation, deviation, deviations[1]);
      }
    });
    sum_over_team(deviations, member.team_size);
    const A correction = deviations[0] / n;
    mean += correction;
    const A invstd = A(1) / std::sqrt((deviations[1] - deviations[0] * correction) / n + A(args.eps));
    if (has_row && member.index == 0) {
      saved[row] = mean;
      saved[plan.rows + row] = invstd;
    }
    for_each_vector_of_row([&](A(&values)[V], int column) {
      A scale[V], shift[V];
      gamma.load(column, scale), beta.load(column, shift);
#pragma unroll
      for (int k = 0; k < V; ++k) values[k] = fma_rn((values[k] - mean) * invstd, scale[k], shift[k]);
      Vector<Y, V> y_vector;
      y_vector.pack(values);
      if (has_row) y_vector.store(y + row * plan.columns + column);
    });
    if (plan.passes == 1) load(row + row_step, /*pass=*/0);
  }
}

void backend::layer_norm_forward(const LayerNormArgs& args) {
  const LaunchContext context(args.device);
  if (args.rows == 0) return;
  dispatch_layer_norm_types</*Half=*/__half, /*BFloat16=*/__nv_bfloat16>(
      args.dtype, args.output_dtype, [&]<class T, class Y>() {
        using A = Accumulation<T>;
        dispatch_row_plan<T, Y, kForwardColumnChoices>(
            args.rows, args.columns, {args.x, args.y}, [&]<int V, int K>(const RowPlan& plan) {
              const auto kernel = layer_norm_forward_kernel<T, Y, V, K>;
              STD_CUDA_CHECK(launch(kernel,
                                    make_row_launch(context, kernel, plan, 2 * column_table_bytes<A>(plan)),
                                    LayerNormForwardParams{{args}, plan}));
            });
      });
}

}  // namespace fastvit
