// exchange_push, exchange_poll: an exchange of packed moments or sums by two kernels of its own.
// Memory   push writes 16 bytes per two floats and rank, poll reads as many. Bound by latency.
// Mapping  push: a thread per pair; poll: one block, so that it can give all numbers or none.
#include "exchange.h"

#include <torch/csrc/stable/ops.h>

#include "host.h"
#include "peer.cuh"

namespace fastvit {
namespace {

template <class A>
struct PushKernel {
  Exchange exchange;
  const A* numbers;
  int64_t C, pairs;
};

template <class A>
struct PollKernel {
  Exchange exchange;
  A* result;  // [world][numbers], or their sum, [numbers]
  int64_t C, pairs;
  bool add;

  __device__ __forceinline__ void write(int64_t row, int64_t i, A first, A second) const {
    A* const to = result + row * 2 * pairs;
    to[i < C ? i : 2 * C] = first;
    to[i < C ? C + i : 2 * C + 1] = second;
  }
  __device__ __forceinline__ bool take(const Poll& poll, int64_t i) const {
    double sums[2] = {0, 0};
    for (int rank = 0; rank < exchange.world; ++rank) {
      A first, second;
      if (!poll.pair(rank, i, first, second)) return false;
      if (!add) write(rank, i, first, second);
      sums[0] += double(first), sums[1] += double(second);
    }
    if (add) write(0, i, A(sums[0]), A(sums[1]));
    return true;
  }
};

template <class A>
__global__ void __launch_bounds__(kThreads) push_kernel(const __grid_constant__ PushKernel<A> args) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, C = args.C;
  const Push push(args.exchange);
  if (!push) return;
  if (i < args.pairs) push.pair(i, args.numbers[i < C ? i : 2 * C], args.numbers[i < C ? C + i : 2 * C + 1]);
  if (i == 0) push.header();
}

template <class A>
__global__ void __launch_bounds__(kThreads) poll_kernel(const __grid_constant__ PollKernel<A> args) {
  const Poll poll(args.exchange);
  bool there = await_headers(poll, args.exchange.world);
  for (int64_t i = threadIdx.x; i < args.pairs && there; i += kThreads) there = args.take(poll, i);
  if (__syncthreads_or(!there)) {
    const int64_t rows = args.add ? 1 : args.exchange.world;
    for (int64_t i = threadIdx.x; i < rows * 2 * args.pairs; i += kThreads) args.result[i] = A(NAN);
  }
  if (threadIdx.x == 0) poll.close();
}

__global__ void give_up_kernel(const __grid_constant__ Exchange exchange) {
  if (threadIdx.x > 0) return;
  const Poll poll(exchange);
  poll.give_up();
  poll.close();
}

__global__ void rejoin_kernel(peer::Arena* arena, uint32_t epoch, uint32_t generation) {
  if (threadIdx.x > 0) return;
  arena->pushed = arena->polled = epoch;
  arena->generation = generation;
  arena->abandoned = 0;
  arena->ended = 0;
}

struct Packed {  // what is exchanged
  int64_t C, pairs;
  Exchange exchange;

  Packed(const char* op, const Tensor& fields, const Tensor& numbers, int64_t kind, bool sends) {
    require((numbers.scalar_type() == ScalarType::Float || numbers.scalar_type() == ScalarType::Double) &&
                numbers.dim() == 1 && numbers.is_contiguous(),
            op, "numbers", "is ", toString(numbers.scalar_type()), " ", shape_of(numbers),
            "; one contiguous row of float32 or float64 expected");
    check_memory(op, "numbers", numbers);
    require(kind == peer::kMoments || kind == peer::kSums, op, "kind", "is ", kind, "; 0 or 1 expected");
    exchange = peer::exchange_of(op, fields, numbers.numel(), numbers.scalar_type(), uint32_t(kind), sends);
    pairs = numbers.numel() / 2;
    C = kind == peer::kMoments ? pairs - 1 : pairs;
  }
};

template <class F>
void with_accumulation(ScalarType dtype, const F& f) {
  dtype == ScalarType::Double ? f.template operator()<double>() : f.template operator()<float>();
}

}  // namespace

void exchange_push(Tensor fields, Tensor numbers, int64_t kind) {
  const Packed packed("exchange_push", fields, numbers, kind, true);
  const Device device(numbers.get_device_index());
  with_accumulation(numbers.scalar_type(), [&]<class A>() {
    const PushKernel<A> kernel{packed.exchange, static_cast<const A*>(numbers.data_ptr()), packed.C,
                               packed.pairs};
    STD_CUDA_CHECK(launch(push_kernel<A>, {ceil_div(packed.pairs, kThreads), device.stream}, kernel));
  });
}

Tensor exchange_poll(Tensor fields, Tensor numbers, int64_t kind, bool add) {
  const Packed packed("exchange_poll", fields, numbers, kind, false);
  const int64_t n = numbers.numel(), world = packed.exchange.world;
  Tensor result =
      add ? torch::stable::new_empty(numbers, {n}) : torch::stable::new_empty(numbers, {world, n});
  const Device device(numbers.get_device_index());
  with_accumulation(numbers.scalar_type(), [&]<class A>() {
    const PollKernel<A> kernel{packed.exchange, static_cast<A*>(result.data_ptr()), packed.C, packed.pairs,
                               add};
    STD_CUDA_CHECK(launch(poll_kernel<A>, {1, device.stream}, kernel));
  });
  return result;
}

void exchange_give_up(Tensor fields, Tensor arena) {
  const Device device(arena.get_device_index());
  STD_CUDA_CHECK(
      launch(give_up_kernel, {1, device.stream},
             peer::exchange_of("exchange_give_up", fields, 2, ScalarType::Float, peer::kMoments, false)));
}

void exchange_rejoin(Tensor arena, int64_t epoch, int64_t generation) {
  require(arena.scalar_type() == ScalarType::Byte && arena.is_contiguous() &&
              arena.numel() >= int64_t(sizeof(peer::Arena)),
          "exchange_rejoin", "arena", "is not a contiguous uint8 tensor of exchange_arena_bytes");
  check_memory("exchange_rejoin", "arena", arena);
  const Device device(arena.get_device_index());
  STD_CUDA_CHECK(launch(rejoin_kernel, {1, device.stream}, static_cast<peer::Arena*>(arena.data_ptr()),
                        uint32_t(epoch), uint32_t(generation)));
}

}  // namespace fastvit
