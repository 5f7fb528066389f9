// pack_message, merge_messages: the messages of a collective of torch.distributed, numbers and tags by which
// ranks detect that they are in different exchanges; fastvit/sync/collective.py calls the ops.
//
// A message has `capacity` numbers, of which the first n are used, and two numbers {layer, forward_index} per tag; the
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
#include "exchange_ops.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace fastvit {
namespace {

using namespace peer;

constexpr int64_t kTagNumbers = 2;

struct Message {
  NumberKind kind;
  int64_t n, capacity, ranks, rank;
  int64_t layer, forward_index;  // below 2^24, so a float holds them
  const void* numbers;           // this rank's

  // The number of messages that the collective returns.
  FASTVIT_HOST_DEVICE int64_t rows() const { return kind == kMoments ? ranks : 1; }
  FASTVIT_HOST_DEVICE int64_t tags() const { return kind == kMoments ? 1 : ranks; }
  FASTVIT_HOST_DEVICE int64_t width() const { return capacity + kTagNumbers * tags(); }
};

struct PackParams : Message {
  void* message = nullptr;
};

// A is the type of the numbers, M that of the message.
template <class A, class M>
__global__ void __launch_bounds__(kThreads)
    pack_message_kernel(const __grid_constant__ KernelParams<PackParams> kernel_params) {
  const auto& args = kernel_params.wait_and_get();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.width()) return;
  const int64_t mine = args.capacity + (args.kind == kMoments ? 0 : kTagNumbers * args.rank);
  M value = 0;
  if (i < args.n) value = M(static_cast<const A*>(args.numbers)[i]);
  if (i == mine) value = M(args.layer);
  if (i == mine + 1) value = M(args.forward_index);
  static_cast<M*>(args.message)[i] = value;
}

struct MergeParams : Message {
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
  __device__ __forceinline__ Tag own_tag() const {
    return {uint32_t(layer), uint32_t(forward_index), 0, kind};
  }

  FASTVIT_HOST_DEVICE int64_t parts() const { return kind == kMoments ? n / 2 : n; }
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
      const double theirs = unpack_count(from + 2 * C);
      if (i < C) MergeWeights::of_counts(count, theirs).merge(mean, m2, from[i], from[C + i]);
      count += theirs;
    }
    if (i == C) {
      pack_count(to + 2 * C, good ? count : double(NAN));
    } else {
      to[i] = good ? A(mean) : A(NAN);
      to[C + i] = good ? A(m2) : A(NAN);
    }
  }
};

template <class A, class M>
__global__ void __launch_bounds__(kThreads)
    merge_messages_kernel(const __grid_constant__ KernelParams<MergeParams> kernel_params) {
  const auto& args = kernel_params.wait_and_get();
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < args.ranks; rank += kThreads)
    differs |= !tags_match(args.template tag_of<M>(rank), args.own_tag());
  const bool good = !__syncthreads_or(differs);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < args.parts()) args.template write<A, M>(i, good);
  if (good || i != 0) return;
  FaultReport report{kMismatch, uint32_t(args.rank), 0, 0, args.own_tag(), {}, 0};
  for (int64_t of = args.ranks - 1; of >= 0; --of) {
    const Tag theirs = args.template tag_of<M>(of);
    if (!tags_match(theirs, report.own_tag)) report.peer = uint32_t(of), report.peer_tag = theirs;
  }
  write_fault_report(args.report, report);
}

Message message_of(const char* op, const Tensor& numbers, const ExchangeDescriptor& descriptor, bool wide) {
  check_numbers(op, numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  require(n <= descriptor.capacity && (wide || !is_double(numbers)), op, "numbers", "is ",
          toString(numbers.scalar_type()), " ", PrintShape{numbers}, "; at most ", descriptor.capacity,
          " numbers of ", wide ? "float64" : "float32", " expected");
  return {number_kind_of(numbers),  n,
          descriptor.capacity,      descriptor.world,
          descriptor.rank,          descriptor.layer,
          descriptor.forward_index, numbers.data_ptr()};
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
  const ExchangeDescriptor& descriptor = read_descriptor("pack_message", fields);
  PackParams packing{message_of("pack_message", numbers, descriptor, descriptor.float64_messages)};
  Tensor result = torch::stable::new_empty(
      numbers, {packing.width()}, descriptor.float64_messages ? ScalarType::Double : ScalarType::Float);
  packing.message = result.data_ptr();
  const LaunchContext context(numbers.get_device_index());
  dispatch_message_types(numbers, descriptor.float64_messages, [&]<class A, class M>() {
    STD_CUDA_CHECK(
        launch(pack_message_kernel<A, M>, {ceil_div(packing.width(), kThreads), context}, packing));
  });
  return result;
}

Tensor merge_messages(Tensor messages, Tensor numbers, Tensor fields) {
  const char* const op = "merge_messages";
  const ExchangeDescriptor& descriptor = read_descriptor(op, fields);
  const bool wide = is_double(messages);
  MergeParams merging{message_of(op, numbers, descriptor, wide)};
  const int64_t expected = merging.rows() * merging.width();
  require((messages.scalar_type() == ScalarType::Float || wide) && messages.is_contiguous() &&
              messages.numel() == expected,
          op, "messages", "is ", toString(messages.scalar_type()), " ", PrintShape{messages}, "; ", expected,
          " numbers expected, the messages of ", descriptor.world, " ranks");
  check_device(op, "messages", messages, numbers);
  check_storage(op, "messages", messages);
  Tensor result = new_group_result(numbers);
  merging.messages = messages.data_ptr();
  merging.result = result.data_ptr();
  merging.report = reinterpret_cast<FaultReport*>(descriptor.report);
  const LaunchContext context(numbers.get_device_index());
  dispatch_message_types(numbers, wide, [&]<class A, class M>() {
    STD_CUDA_CHECK(
        launch(merge_messages_kernel<A, M>, {ceil_div(merging.parts(), kThreads), context}, merging));
  });
  return result;
}

}  // namespace fastvit
