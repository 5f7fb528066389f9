// The ops' argument `exchange`: it describes a process group and one exchange of its ranks, as a row of int64
// on the CPU, which ops only read. fastvit/sync/protocol.py repeats the fields of ExchangeDescriptor up to
// `arenas`, of Tag and FaultReport, and the first two of Arena.
//
// An exchange merges the numbers of all ranks (processes) of the group: moments, `[2C + 2]` (mean[C], M2[C]
// and the count, stored as two numbers), or sums, `[1, 2C]` (two sums of each of C channels). The ranks
// exchange by shared memory, where each rank has an arena to which the others write their messages, or by a
// collective of torch.distributed.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstddef>

#include "../op_checker.h"
#include "protocol.h"

namespace fastvit::peer {

struct ExchangeDescriptor {
  int64_t rank;   // this rank
  int64_t world;  // the number of ranks
  // The largest payload of a message: in packets of 16 bytes if ranks share memory, in numbers if they use a
  // collective.
  int64_t capacity;
  int64_t float64_messages;  // not 0: a collective's messages are float64
  // On GPUs: how long an exchange with arenas waits before a missing message is a fault. On CPUs: how long it
  // waits before the op returns to Python, which may wait again.
  int64_t timeout_ns;
  // Ranks compare these two numbers to see that they are in the same exchange. `layer` is the index of the
  // layer in the group. `forward_index` is the number of a forward exchange in the group; a backward has
  // that of its forward.
  int64_t layer, forward_index;
  int64_t report;             // the address of a FaultReport, which an op writes if the exchange fails
  int64_t arenas[kMaxRanks];  // addresses, by rank; a row for a collective ends before them
};

constexpr int64_t kFieldsBeforeArenas = offsetof(ExchangeDescriptor, arenas) / sizeof(int64_t);

// The largest number of ranks that use a collective. No group is so large; the limit keeps the length of the
// messages of all ranks, counted in numbers, within int64.
constexpr int64_t kMaxCollectiveRanks = int64_t(1) << 31;

// The size of a rank's arena: a multiple of the alignment, so that arenas may be consecutive. The limits here
// only keep the size within int64; make_exchange checks that there are at most kMaxRanks.
inline int64_t arena_bytes(int64_t world, int64_t capacity) {
  require(world >= 1 && world <= 1 << 12 && capacity >= 0 && capacity <= int64_t(1) << 31, "arena_bytes",
          "world", "is for ", world, " ranks and ", capacity, " packets; 1 to 2^12 and 0 to 2^31 expected");
  const int64_t bytes =
      int64_t(sizeof(Arena)) + InboxLayout{world, capacity}.packet_count() * int64_t(sizeof(Packet));
  return (bytes + alignof(Arena) - 1) / alignof(Arena) * alignof(Arena);
}

inline bool is_float64(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double;
}

inline NumberKind number_kind_of(const Tensor& numbers) {
  return numbers.dim() == 1 ? kMoments : kSums;
}

// How many numbers each rank has: 2C + 2 numbers of moments, or 2C sums. `numbers` may also be the result of
// an exchange, whose last dimension is the same.
inline int64_t numbers_per_rank(const Tensor& numbers) {
  return numbers.size(numbers.dim() - 1);
}

inline void check_numbers(const char* op, const Tensor& numbers) {
  const int64_t n = numbers.dim() ? numbers_per_rank(numbers) : 0;
  require((numbers.scalar_type() == ScalarType::Float || is_float64(numbers)) && numbers.is_contiguous() &&
              (numbers.dim() == 1 || (numbers.dim() == 2 && numbers.size(0) == 1)) && n >= 2 && n % 2 == 0,
          op, "numbers", "is ", toString(numbers.scalar_type()), " ", PrintShape{numbers},
          "; moments (2C + 2,) or sums (1, 2C) expected, contiguous, float32 or float64");
  check_storage_size(op, "numbers", numbers);
}

// A new tensor for an exchange's result: the merged moments of all ranks, `[2C + 2]`, or two rows of sums,
// `[2, 2C]`: this rank's, then the total of all ranks.
inline Tensor new_group_result(const Tensor& numbers) {
  const int64_t n = numbers_per_rank(numbers);
  return number_kind_of(numbers) == kMoments ? torch::stable::new_empty(numbers, {n})
                                             : torch::stable::new_empty(numbers, {2, n});
}

inline const ExchangeDescriptor& read_descriptor(const char* op, const Tensor& exchange) {
  require(exchange.scalar_type() == ScalarType::Long && exchange.is_contiguous() && exchange.is_cpu() &&
              exchange.numel() >= kFieldsBeforeArenas,
          op, "exchange", "is not a contiguous row of at least ", kFieldsBeforeArenas, " int64 on the CPU");
  check_storage_size(op, "exchange", exchange);
  const ExchangeDescriptor& descriptor = *static_cast<const ExchangeDescriptor*>(exchange.data_ptr());
  require(descriptor.world >= 1 && descriptor.rank >= 0 && descriptor.rank < descriptor.world &&
              descriptor.capacity > 0 &&
              (exchange.numel() == kFieldsBeforeArenas ||
               exchange.numel() == kFieldsBeforeArenas + descriptor.world),
          op, "exchange", "has rank ", descriptor.rank, " of ", descriptor.world, ", capacity ",
          descriptor.capacity, ", ", exchange.numel(), " numbers");
  // With a collective, `world` may exceed kMaxRanks.
  require(descriptor.world <= kMaxCollectiveRanks && descriptor.capacity <= int64_t(1) << 31, op, "exchange",
          "is for ", descriptor.world, " ranks, capacity ", descriptor.capacity,
          "; at most 2^31 of each expected");
  return descriptor;
}

// The tag (what ranks compare before they merge) of a message of `n` numbers of `dtype`.
inline Tag make_tag(const ExchangeDescriptor& descriptor, int64_t n, ScalarType dtype, NumberKind kind) {
  const bool is_wide = dtype == ScalarType::Double;
  return {.layer = uint32_t(descriptor.layer),
          .forward_index = uint32_t(descriptor.forward_index),
          .words = uint32_t(is_wide ? 2 * n : n),
          .kind = uint32_t(kind) | (is_wide ? uint32_t(kFloat64) : 0u)};
}

// Checks the op's argument `exchange` for messages of `n` numbers of `dtype`, and returns the exchange as a
// struct for kernels. The ranks must share memory. A packet counts as two words, as on GPUs.
inline Exchange make_exchange(const char* op, const Tensor& exchange, int64_t n, ScalarType dtype,
                              NumberKind kind) {
  const ExchangeDescriptor& descriptor = read_descriptor(op, exchange);
  require(exchange.numel() > kFieldsBeforeArenas && descriptor.world <= kMaxRanks, op, "exchange", "has ",
          descriptor.world, " ranks and no peer memory; at most ", kMaxRanks,
          " ranks with their arenas expected");
  const Tag tag = make_tag(descriptor, n, dtype, kind);
  require(n > 0 && n % 2 == 0 && tag.words / 2 <= descriptor.capacity, op, "exchange", "is for ", n,
          " numbers, that is ", tag.words / 2, " packets; an even n > 0 and at most ", descriptor.capacity,
          " packets expected, the capacity");
  Exchange group_exchange;
  group_exchange.world = int(descriptor.world);
  group_exchange.rank = int(descriptor.rank);
  group_exchange.capacity = descriptor.capacity;
  group_exchange.timeout_ns = uint64_t(descriptor.timeout_ns);
  group_exchange.tag = tag;
  group_exchange.report = reinterpret_cast<FaultReport*>(descriptor.report);
  for (int64_t rank = 0; rank < descriptor.world; ++rank)
    group_exchange.arenas[rank] = reinterpret_cast<Arena*>(descriptor.arenas[rank]);
  return group_exchange;
}

}  // namespace fastvit::peer
