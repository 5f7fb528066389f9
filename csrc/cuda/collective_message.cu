// pack_message: the message of a rank (process) to a collective of torch.distributed: moments or sums.
// merge_messages: moments (mean, M2, count; merged by Chan's update) or sums of all ranks, from what the
// collective returns.
//
// Memory:   reads and writes each message once. Bound by latency.
// Mapping:  to pack, a thread for each number of the message. To merge, a thread for each channel, or for
//           each sum, of the result; every block compares the tags of all ranks, and writes NaN if one
//           differs from this rank's.
// Numerics: moments are merged in double and in the order of ranks. Sums are added by the collective.
// Source:   Chan, Golub, LeVeque (1979), see moments.h.
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

// A message has a Tag's {layer, forward_index}, by which ranks see that they are in the same exchange.
constexpr int64_t kNumbersPerTag = 2;

// A message has `capacity` numbers, then its tags. The first n numbers are used; the others are 0.
// All messages of a group have the same capacity, also in different layers: ranks may be in different layers,
// and a collective needs messages of one length.
// Moments: a message has one tag, and all_gather returns the messages of all ranks.
// Sums: a message has a tag for each rank; a rank writes its own tag and 0 for the others. all_reduce adds
// the messages, so it returns one message with the sums and the tags of all ranks.
struct MessageArgs {
  NumberKind kind;  // moments, or sums
  // How many numbers each rank has: moments [2C + 2] (mean[C], M2[C] and the count, stored as two numbers),
  // or sums [2C].
  int64_t n;
  int64_t capacity;  // the largest n of the group's layers
  int64_t ranks;     // how many ranks the group has
  int64_t own_rank;
  // This rank's tag. `layer` is the index of the layer in the group. `forward_index` is the number of a
  // forward exchange in the group; its backward has the same. Both are below 2^24, so a float holds them.
  int64_t layer, forward_index;
  const void* own_numbers;

  // How many messages the collective returns.
  FASTVIT_HOST_DEVICE int64_t message_count() const { return kind == kMoments ? ranks : 1; }
  FASTVIT_HOST_DEVICE int64_t tags_per_message() const { return kind == kMoments ? 1 : ranks; }
  FASTVIT_HOST_DEVICE int64_t numbers_per_message() const {
    return capacity + kNumbersPerTag * tags_per_message();
  }
};

struct PackMessageParams : MessageArgs {
  void* message = nullptr;
};

// A: the type of the op's numbers, float or double. M: the type of a message's numbers, at least as wide.
template <class A, class M>
__global__ void __launch_bounds__(kThreads)
    pack_message_kernel(const __grid_constant__ KernelParams<PackMessageParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.numbers_per_message()) return;
  const int64_t own_tag_offset = args.capacity + (args.kind == kMoments ? 0 : kNumbersPerTag * args.own_rank);
  M value = 0;
  if (i < args.n) value = M(static_cast<const A*>(args.own_numbers)[i]);
  if (i == own_tag_offset) value = M(args.layer);
  if (i == own_tag_offset + 1) value = M(args.forward_index);
  static_cast<M*>(args.message)[i] = value;
}

struct MergeMessagesParams : MessageArgs {
  const void* messages = nullptr;  // [message_count][numbers_per_message]
  void* result = nullptr;          // merged moments [2C + 2], or sums [2][2C]: this rank's, then the total
  FaultReport* report = nullptr;   // in host memory; the host raises an error from it

  template <class M>
  __device__ __forceinline__ const M* message(int64_t i) const {
    return static_cast<const M*>(messages) + i * numbers_per_message();
  }
  // The tag of a rank: in its own message, or with sums in the only message. Messages have no Tag::words and
  // Tag::kind, so in both tags of a comparison `words` is 0 and `kind` is this rank's.
  template <class M>
  __device__ __forceinline__ Tag tag_of(int64_t rank) const {
    const M* const tag =
        message<M>(rank / tags_per_message()) + capacity + rank % tags_per_message() * kNumbersPerTag;
    return {.layer = uint32_t(tag[0]), .forward_index = uint32_t(tag[1]), .words = 0, .kind = kind};
  }
  __device__ __forceinline__ Tag own_tag() const {
    return {.layer = uint32_t(layer), .forward_index = uint32_t(forward_index), .words = 0, .kind = kind};
  }

  // How many threads write the result. Moments: one for each channel, and one for the count. Sums: one for
  // each sum.
  FASTVIT_HOST_DEVICE int64_t result_threads() const { return kind == kMoments ? n / 2 : n; }

  template <class A, class M>
  __device__ __forceinline__ void write_result(int64_t i, bool is_good) const {
    if (kind == kSums)
      write_sum<A, M>(i, is_good);
    else
      write_moments<A, M>(i, is_good);
  }
  template <class A, class M>
  __device__ __forceinline__ void write_sum(int64_t i, bool is_good) const {
    A* const sums = static_cast<A*>(result);
    sums[i] = static_cast<const A*>(own_numbers)[i];
    sums[n + i] = is_good ? A(message<M>(0)[i]) : A(NAN);
  }
  // Thread i < C writes mean and M2 of channel i, and thread C the count.
  template <class A, class M>
  __device__ __forceinline__ void write_moments(int64_t i, bool is_good) const {
    A* const moments = static_cast<A*>(result);
    const int64_t C = n / 2 - 1;
    double count = 0, mean = 0, m2 = 0;
    for (int64_t rank = 0; rank < ranks && is_good; ++rank) {
      const M* const rank_moments = message<M>(rank);
      const double rank_count = unpack_count(rank_moments + 2 * C);
      if (i < C)
        MergeWeights::from_counts(count, rank_count).merge(mean, m2, rank_moments[i], rank_moments[C + i]);
      count += rank_count;
    }
    if (i == C) {
      pack_count(moments + 2 * C, is_good ? count : double(NAN));
    } else {
      moments[i] = is_good ? A(mean) : A(NAN);
      moments[C + i] = is_good ? A(m2) : A(NAN);
    }
  }
};

// A, M: as in pack_message_kernel.
template <class A, class M>
__global__ void __launch_bounds__(kThreads)
    merge_messages_kernel(const __grid_constant__ KernelParams<MergeMessagesParams> kernel_params) {
  const auto& args = kernel_params.get_after_previous_kernel();  // waits for the stream's previous kernel
  bool differs = false;
  for (int64_t rank = threadIdx.x; rank < args.ranks; rank += kThreads)
    differs |= !tags_match(args.template tag_of<M>(rank), args.own_tag());
  const bool is_good = !__syncthreads_or(differs);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < args.result_threads()) args.template write_result<A, M>(i, is_good);
  if (is_good || i != 0) return;
  FaultReport report{.fault = kMismatch,
                     .rank = uint32_t(args.own_rank),
                     .peer = 0,
                     .epoch = 0,  // exchanges by a collective have no epoch
                     .own_tag = args.own_tag(),
                     .peer_tag = {},
                     .missing_ranks_mask = 0};
  // The loop runs backwards, so the last assignment is that of the first rank whose tag differs.
  for (int64_t rank = args.ranks - 1; rank >= 0; --rank) {
    const Tag tag = args.template tag_of<M>(rank);
    if (!tags_match(tag, report.own_tag)) report.peer = uint32_t(rank), report.peer_tag = tag;
  }
  write_fault_report(args.report, report);
}

MessageArgs check_message_args(const char* op, const Tensor& numbers, const ExchangeDescriptor& descriptor,
                               bool float64_messages) {
  check_numbers(op, numbers);
  const int64_t n = numbers_per_rank(numbers);
  require(n <= descriptor.capacity && (float64_messages || !is_float64(numbers)), op, "numbers", "is ",
          toString(numbers.scalar_type()), " ", PrintShape{numbers}, "; at most ", descriptor.capacity,
          " numbers of ", float64_messages ? "float64" : "float32", " expected");
  return {.kind = number_kind_of(numbers),
          .n = n,
          .capacity = descriptor.capacity,
          .ranks = descriptor.world,
          .own_rank = descriptor.rank,
          .layer = descriptor.layer,
          .forward_index = descriptor.forward_index,
          .own_numbers = numbers.data_ptr()};
}

// Calls f.template operator()<A, M>() for the types of the numbers and of the message.
template <class F>
void dispatch_message_types(const Tensor& numbers, bool float64_messages, const F& f) {
  if (is_float64(numbers))
    f.template operator()<double, double>();
  else if (float64_messages)
    f.template operator()<float, double>();
  else
    f.template operator()<float, float>();
}

}  // namespace

Tensor pack_message(Tensor numbers, Tensor exchange) {
  const ExchangeDescriptor& descriptor = read_descriptor("pack_message", exchange);
  const bool float64_messages = descriptor.float64_messages;
  PackMessageParams params{check_message_args("pack_message", numbers, descriptor, float64_messages)};
  Tensor message = torch::stable::new_empty(numbers, {params.numbers_per_message()},
                                            float64_messages ? ScalarType::Double : ScalarType::Float);
  params.message = message.data_ptr();
  const LaunchContext context(numbers.get_device_index());
  const int64_t blocks = ceil_div(params.numbers_per_message(), kThreads);
  dispatch_message_types(numbers, float64_messages, [&]<class A, class M>() {
    STD_CUDA_CHECK(launch(pack_message_kernel<A, M>, {.blocks = blocks, .context = context}, params));
  });
  return message;
}

Tensor merge_messages(Tensor messages, Tensor numbers, Tensor exchange) {
  const char* const op = "merge_messages";
  const ExchangeDescriptor& descriptor = read_descriptor(op, exchange);
  const bool float64_messages = is_float64(messages);
  MergeMessagesParams params{check_message_args(op, numbers, descriptor, float64_messages)};
  const int64_t expected = params.message_count() * params.numbers_per_message();
  require((messages.scalar_type() == ScalarType::Float || float64_messages) && messages.is_contiguous() &&
              messages.numel() == expected,
          op, "messages", "is ", toString(messages.scalar_type()), " ", PrintShape{messages}, "; ", expected,
          " numbers expected, the messages of ", descriptor.world, " ranks");
  check_device(op, "messages", messages, numbers);
  check_storage_size(op, "messages", messages);
  Tensor result = new_group_result(numbers);
  params.messages = messages.data_ptr();
  params.result = result.data_ptr();
  params.report = reinterpret_cast<FaultReport*>(descriptor.report);
  const LaunchContext context(numbers.get_device_index());
  const int64_t blocks = ceil_div(params.result_threads(), kThreads);
  dispatch_message_types(numbers, float64_messages, [&]<class A, class M>() {
    STD_CUDA_CHECK(launch(merge_messages_kernel<A, M>, {.blocks = blocks, .context = context}, params));
  });
  return result;
}

}  // namespace fastvit
