// pack_message, merge_messages: the messages of a collective of torch.distributed, numbers and tags by which
// ranks detect that they are in different exchanges; fastvit/sync/collective.py calls the ops.
//
// A message has `capacity` numbers, of which the first n are used, and two numbers {layer, step} per tag; the
// rest is 0. All messages have the same size, also in different layers. Forward a message has one tag, and
// all_gather returns one message per rank. Backward it has one tag per rank, each rank writes its own, and
// all_reduce returns one message with the sums and all tags.
//
// Memory   reads and writes each message once. Bound by latency.
// Mapping  a thread per part; every block compares all tags, and writes numbers or NaN.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "../moments.h"
#include "../sync/exchange_descriptor.h"
#include "launch.cuh"
#include "exchange_ops.h"
#include "ptx.cuh"

namespace fastvit {
namespace {

using namespace peer;

constexpr int64_t kTagNumbers = 2;

struct Message {
  Kind kind;
  int64_t n, capacity, ranks, rank;
  int64_t layer, step;  // below 2^24, so a float holds them
  const void* numbers;  // this rank's

  // The number of messages that the collective returns.
  FASTVIT_INLINE int64_t rows() const { return kind == kMoments ? ranks : 1; }
  FASTVIT_INLINE int64_t tags() const { return kind == kMoments ? 1 : ranks; }
  FASTVIT_INLINE int64_t width() const { return capacity + kTagNumbers * tags(); }
};

struct Packing : Message {
  void* message = nullptr;
};

// A is the type of the numbers, M that of the message.
template <class A, class M>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Launched<Packing> launched) {
  const auto& args = launched.begin();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.width()) return;
  const int64_t mine = args.capacity + (args.kind == kMoments ? 0 : kTagNumbers * args.rank);
  M value = 0;
  if (i < args.n) value = M(static_cast<const A*>(args.numbers)[i]);
  if (i == mine) value = M(args.layer);
  if (i == mine + 1) value = M(args.step);
  static_cast<M*>(args.message)[i] = value;
}

struct Merging : Message {
  const void* messages = nullptr;  // [rows][width]
  void* result = nullptr;          // moments, or two rows of sums: this rank's, and the group's
  FaultReport* report = nullptr;

  template <class M>
  __device__ __forceinline__ const M* row(int64_t r) const {
    return static_cast<const M*>(messages) + r * width();
  }
  template <class M>
  __device__ __forceinline__ Tag tag_of(int64_t of) const {
    const M* const tag = row<M>(of / tags()) + capacity + of % tags() * kTagNumbers;
    return {uint32_t(tag[0]), uint32_t(tag[1]), 0, kind};
  }
  __device__ __forceinline__ Tag own_tag() const { return {uint32_t(layer), uint32_t(step), 0, kind}; }

  FASTVIT_INLINE int64_t parts() const { return kind == kMoments ? n / 2 : n; }
  // Writes part i of the result: a channel of moments or, as the last part, the count; a number of sums.
  template <class A, class M>
  __device__ __forceinline__ void write(int64_t i, bool good) const {
    A* const to = static_cast<A*>(result);
    if (kind == kSums) {
      to[i] = static_cast<const A*>(numbers)[i];
      to[n + i] = good ? A(row<M>(0)[i]) : A(NAN);
      return;
    }
    const int64_t C = n / 2 - 1;
    double count = 0, mean = 0, m2 = 0;
    for (int64_t r = 0; r < ranks && good; ++r) {
      const M* const from = row<M>(r);
      const double theirs = load_count(from + 2 * C);
      if (i < C) ChanWeights::of(count, theirs).merge(mean, m2, from[i], from[C + i]);
      count += theirs;
    }
    if (i == C) {
      store_count(to + 2 * C, good ? count : double(NAN));
    } else {
      to[i] = good ? A(mean) : A(NAN);
      to[C + i] = good ? A(m2) : A(NAN);
    }
  }
};

template <class A, class M>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Launched<Merging> launched) {
  const auto& args = launched.begin();
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < args.ranks; rank += kThreads)
    differs |= !same_exchange(args.template tag_of<M>(rank), args.own_tag());
  const bool good = !__syncthreads_or(differs);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < args.parts()) args.template write<A, M>(i, good);
  if (good || i != 0) return;
  FaultReport report{kMismatch, uint32_t(args.rank), 0, 0, args.own_tag(), {}, 0};
  for (int64_t of = args.ranks - 1; of >= 0; --of) {
    const Tag theirs = args.template tag_of<M>(of);
    if (!same_exchange(theirs, report.mine)) report.peer = uint32_t(of), report.theirs = theirs;
  }
  report_fault(args.report, report);
}

Message message_of(const char* op, const Tensor& numbers, const Handle& handle, bool wide) {
  check_numbers(op, numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  require(n <= handle.capacity && (wide || !is_double(numbers)), op, "numbers", "is ",
          toString(numbers.scalar_type()), " ", ShapeOf{numbers}, "; at most ", handle.capacity,
          " numbers of ", wide ? "float64" : "float32", " expected");
  return {kind_of(numbers), n,           handle.capacity,   handle.world, handle.rank,
          handle.layer,     handle.step, numbers.data_ptr()};
}

// f.template operator()<A, M>() for the types of the numbers and of the message.
template <class F>
void dispatch_message_types(const Tensor& numbers, bool wide, const F& f) {
  if (is_double(numbers))
    f.template operator()<double, double>();
  else if (wide)
    f.template operator()<float, double>();
  else
    f.template operator()<float, float>();
}

}  // namespace

Tensor pack_message(Tensor numbers, Tensor fields) {
  const Handle& handle = handle_of("pack_message", fields);
  Packing packing{message_of("pack_message", numbers, handle, handle.wide)};
  Tensor result = torch::stable::new_empty(numbers, {packing.width()},
                                           handle.wide ? ScalarType::Double : ScalarType::Float);
  packing.message = result.data_ptr();
  const Device device(numbers.get_device_index());
  dispatch_message_types(numbers, handle.wide, [&]<class A, class M>() {
    STD_CUDA_CHECK(launch(pack_kernel<A, M>, {ceil_div(packing.width(), kThreads), device}, packing));
  });
  return result;
}

Tensor merge_messages(Tensor messages, Tensor numbers, Tensor fields) {
  const char* const op = "merge_messages";
  const Handle& handle = handle_of(op, fields);
  const bool wide = is_double(messages);
  Merging merging{message_of(op, numbers, handle, wide)};
  const int64_t expected = merging.rows() * merging.width();
  require((messages.scalar_type() == ScalarType::Float || wide) && messages.is_contiguous() &&
              messages.numel() == expected,
          op, "messages", "is ", toString(messages.scalar_type()), " ", ShapeOf{messages}, "; ", expected,
          " numbers expected, the messages of ", handle.world, " ranks");
  check_device(op, "messages", messages, numbers);
  check_memory(op, "messages", messages);
  Tensor result = shared_result(numbers);
  merging.messages = messages.data_ptr();
  merging.result = result.data_ptr();
  merging.report = reinterpret_cast<FaultReport*>(handle.report);
  const Device device(numbers.get_device_index());
  dispatch_message_types(numbers, wide, [&]<class A, class M>() {
    STD_CUDA_CHECK(launch(merge_kernel<A, M>, {ceil_div(merging.parts(), kThreads), device}, merging));
  });
  return result;
}

}  // namespace fastvit
