// layer_norm_backward: dx = invstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gamma, for each row; and
// for each column sum dy and sum dy * xhat, the gradients of bias and weight.
//
// Memory:   reads x and dy once; writes dx, and two numbers per block and column. Rows of several passes,
//           which exceed the registers, are read twice and add to these numbers. Bound by bandwidth.
// Mapping:  a team of threads takes a row, see layer_norm.cuh. A block takes rows until none is left. If rows
//           take one pass, the weight is in shared memory, a thread keeps the sums of its columns, and at the
//           end the block's teams add these sums. A second kernel adds the sums of all blocks.
// Numerics: float (double for double). The order of sums depends on shapes, alignment, device; no atomics.
// Source:   Ba, Kiros, Hinton, arXiv:1607.06450.
#include "launch_memory.h"
#include "layer_norm.cuh"

namespace fastvit {

template <class A>
struct LayerNormBackwardParams : LayerNormArgs {
  RowPlan plan;
  A* block_sums;  // [blocks][2][columns]: of dy and of dy * xhat; null: no sums are needed
};

// Columns per member: the plan takes one of two choices (layer_norm.cuh). For an x of __half both are 16.
// For bfloat16 the second is 24, but 24 columns of __half would take more registers than a thread has if two
// blocks share a multiprocessor.
template <>
constexpr int kBackwardColumnChoices<__half>[2] = {16, 16};

// T: type of x and dx. Y: type of dy. V: elements of a vector: 1, or as many of the larger type as 16
// bytes hold. K: vectors of a row that a thread has in registers. A thread without a row takes part in
// sum_over_team too.
//
// Kept in one function: its parts would all need the vectors and sums in registers, and a split changes the
// compiler's use of registers.
template <class T, class Y, int V, int K>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) layer_norm_backward_kernel(
    const __grid_constant__ KernelParams<LayerNormBackwardParams<Accumulation<T>>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  using A = Accumulation<T>;
  const RowPlan& plan = args.plan;
  const TeamMember<V, K> member(plan);
  const A n = A(plan.columns);
  // If rows take one pass, a thread keeps the sums of its columns in registers. With several passes the
  // block has one team, a column belongs to one thread, and the sums are in global memory. The loop below
  // sets them to zero.
  A thread_bias_sums[K][V] = {}, thread_weight_sums[K][V] = {};
  A* const block_bias_sums = args.block_sums ? args.block_sums + 2 * blockIdx.x * plan.columns : nullptr;
  A* const block_weight_sums = args.block_sums ? block_bias_sums + plan.columns : nullptr;
  for (int pass = 0; args.block_sums && plan.passes > 1 && pass < plan.passes; ++pass)
    member.for_each_vector(pass, [&](int, int column) {
#pragma unroll
      for (int k = 0; k < V; ++k) block_bias_sums[column + k] = block_weight_sums[column + k] = 0;
    });

  const A* const saved = static_cast<const A*>(args.saved);
  Vector<T, V> x_vectors[K];
  Vector<Y, V> dy_vectors[K];
  A mean, invstd;  // of the row in the vectors
  const auto load = [&](int64_t row, int pass) {
    const bool has_row = row < plan.rows;
    mean = has_row ? saved[row] : A(0), invstd = has_row ? saved[plan.rows + row] : A(0);
    const int64_t first_element = row * plan.columns;
    member.for_each_vector(pass, [&](int j, int column) {
      x_vectors[j].clear(), dy_vectors[j].clear();
      if (has_row) {
        x_vectors[j].load(static_cast<const T*>(args.x) + first_element + column);
        dy_vectors[j].load(static_cast<const Y*>(args.dy) + first_element + column);
      }
    });
  };
  const int row_step = int(gridDim.x) * plan.teams();
  int64_t first_row = int64_t(blockIdx.x) * plan.teams();
  load(first_row + member.team, /*pass=*/0);
  FASTVIT_DYNAMIC_SHARED(shared);  // declares the launch's dynamic shared memory
  const ColumnTable<A, V> gamma_table(args.weight, /*default_value=*/1, shared, /*table_index=*/0, plan);
  gamma_table.fill();
  __syncthreads();

  for (; first_row < plan.rows; first_row += row_step) {
    const int64_t row = first_row + member.team;
    const bool has_row = row < plan.rows;  // false for the last teams in the block's last turn
    // Prefetches the next row to the cache. There are too few registers to load it while this row is summed.
    if (plan.passes == 1 && row + row_step < plan.rows)
      member.for_each_vector(/*pass=*/0, [&](int, int column) {
        const int64_t element = (row + row_step) * plan.columns + column;
        prefetch(static_cast<const T*>(args.x) + element);
        prefetch(static_cast<const Y*>(args.dy) + element);
      });
    // Calls f(j, column, x, dy, gamma) for this thread's vectors of the row in all passes. Vector j of a pass
    // begins at the column.
    const auto for_each_vector_of_row = [&](const auto& f) {
      for (int pass = 0; pass < plan.passes; ++pass) {
        if (plan.passes > 1) load(row, pass);
        member.for_each_vector(pass, [&](int j, int column) {
          A x[V], dy[V], gamma[V];
          x_vectors[j].unpack(x), dy_vectors[j].unpack(dy), gamma_table.load(column, gamma);
          f(j, column, x, dy, gamma);
        });
      }
    };

    A sums[2] = {0, 0};  // of g = dy * gamma, and of g * xhat
    for_each_vector_of_row([&](int j, int column, const A(&x)[V], const A(&dy)[V], const A(&gamma)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A xhat = (x[k] - mean) * invstd, g = dy[k] * gamma[k];
        sums[0] += g;
        sums[1] = fma_rn(g, xhat, sums[1]);
        if (plan.passes == 1) {
          thread_bias_sums[j][k] += dy[k];
          thread_weight_sums[j][k] = fma_rn(dy[k], xhat, thread_weight_sums[j][k]);
        } else if (args.block_sums) {
          block_bias_sums[column + k] += dy[k];
          block_weight_sums[column + k] = fma_rn(dy[k], xhat, block_weight_sums[column + k]);
        }
      }
    });
    sum_over_team(sums, member.team_size);
    const A mean_g = sums[0] / n, mean_g_xhat = sums[1] / n;
    for_each_vector_of_row([&](int j, int column, A(&x)[V], const A(&dy)[V], const A(&gamma)[V]) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const A xhat = (x[k] - mean) * invstd;
        x[k] = fma_rn(-xhat, mean_g_xhat, fma_rn(dy[k], gamma[k], -mean_g)) * invstd;
      }
      x_vectors[j].pack(x);  // dx, in the registers of x
      if (has_row) x_vectors[j].store(static_cast<T*>(args.dx) + row * plan.columns + column);
    });
    if (plan.passes == 1) load(row + row_step, /*pass=*/0);
  }

  if (!args.block_sums || plan.passes > 1) return;
  A* const team_sums = reinterpret_cast<A*>(shared);  // [teams][padded_columns], in place of the weight
  const int padded_columns = member.team_size * K * V;
  const auto merge_teams = [&](const A(&thread_sums)[K][V], A* block_sums) {
    __syncthreads();
    member.for_each_vector(/*pass=*/0, [&](int j, int column) {
#pragma unroll
      for (int k = 0; k < V; ++k) team_sums[member.team * padded_columns + column + k] = thread_sums[j][k];
    });
    __syncthreads();
    for (int column = int(threadIdx.x); column < plan.columns; column += kThreads) {
      A sum = 0;
      for (int team = 0; team < plan.teams(); ++team) sum += team_sums[team * padded_columns + column];
      block_sums[column] = sum;
    }
  };
  merge_teams(thread_bias_sums, block_bias_sums);
  merge_teams(thread_weight_sums, block_weight_sums);
}

// Columns that a block of add_rows_kernel adds: 8 floats are 32 bytes, a sector of memory.
constexpr int kAddedColumnsPerBlock = 8;
// Rows that a thread has in flight. A column has 32 threads, so a block adds 512 rows in one turn.
constexpr int kRowsInFlight = 16;

// A matrix of rows x columns numbers. sums[columns] gets the sum of its rows, a sum for each column.
template <class A>
struct AddRowsParams {
  const A* matrix;
  A* sums;
  int64_t rows, columns;
};

template <class A>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    add_rows_kernel(const __grid_constant__ KernelParams<AddRowsParams<A>> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  constexpr int kWarps = kThreads / 32, kThreadsPerColumn = kThreads / kAddedColumnsPerBlock;
  __shared__ A warp_sums[kWarps][kAddedColumnsPerBlock];
  const int block_column = int(threadIdx.x) % kAddedColumnsPerBlock;
  const int64_t column = int64_t(blockIdx.x) * kAddedColumnsPerBlock + block_column;
  A sum = 0;
  for (int64_t first_row = int(threadIdx.x) / kAddedColumnsPerBlock; first_row < args.rows;
       first_row += kThreadsPerColumn * kRowsInFlight) {
    A values[kRowsInFlight];
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) {
      const int64_t row = first_row + k * kThreadsPerColumn;
      values[k] = row < args.rows && column < args.columns ? args.matrix[row * args.columns + column] : A(0);
    }
#pragma unroll
    for (int k = 0; k < kRowsInFlight; ++k) sum += values[k];
  }
  for (int offset = kAddedColumnsPerBlock; offset < 32; offset *= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 < kAddedColumnsPerBlock) warp_sums[threadIdx.x / 32][block_column] = sum;
  __syncthreads();
  if (int(threadIdx.x) >= kAddedColumnsPerBlock || column >= args.columns) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += warp_sums[warp][block_column];
  args.sums[column] = sum;
}

void backend::layer_norm_backward(const LayerNormArgs& args) {
  const LaunchContext context(args.device);
  const int64_t num_sums = 2 * args.columns;
  dispatch_layer_norm_types</*Half=*/__half, /*BFloat16=*/__nv_bfloat16>(
      args.dtype, args.output_dtype, [&]<class T, class Y>() {
        using A = Accumulation<T>;
        if (args.rows == 0) {
          if (args.sums) STD_CUDA_CHECK(cudaMemsetAsync(args.sums, 0, num_sums * sizeof(A), context.stream));
          return;
        }
        const std::initializer_list<const void*> pointers = {args.x, args.dy, args.dx};
        dispatch_row_plan<T, Y, kBackwardColumnChoices<T>>(
            args.rows, args.columns, pointers, [&]<int V, int K>(const RowPlan& plan) {
              const auto kernel = layer_norm_backward_kernel<T, Y, V, K>;
              // Shared memory holds the weight if rows take one pass. After the last row it holds the
              // threads' sums for the gradient of the bias, and then those for the gradient of the weight.
              const size_t shared_bytes = std::max(column_table_bytes<A>(plan), kThreads * K * V * sizeof(A));
              const LaunchConfig config = make_row_launch(context, kernel, plan, shared_bytes);
              const Scratch block_sums(args.sums ? config.blocks * num_sums * sizeof(A) : 0);
              const LayerNormBackwardParams<A> params{{args}, plan, static_cast<A*>(block_sums.data)};
              STD_CUDA_CHECK(launch(kernel, config, params));
              if (!args.sums) return;
              const AddRowsParams<A> sum_params{params.block_sums, static_cast<A*>(args.sums),
                                                /*rows=*/config.blocks, /*columns=*/num_sums};
              const int64_t blocks = ceil_div(num_sums, kAddedColumnsPerBlock);
              STD_CUDA_CHECK(launch(add_rows_kernel<A>, {blocks, context}, sum_params));
            });
      });
}

}  // namespace fastvit
