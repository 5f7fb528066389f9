// The ops' argument `exchange`: a group, as a row of int64 on the CPU, which ops only read. Faults are
// written to a FaultReport. The fields here and of FaultReport and Arena must equal those in
// fastvit/sync/protocol.py.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstddef>

#include "../op_checker.h"
#include "protocol.h"

namespace fastvit::peer {

struct ExchangeDescriptor {
  int64_t rank, world;
  int64_t capacity;              // of a message: packets in peer memory, numbers in a collective
  int64_t float64_messages;      // a collective's messages are float64
  int64_t timeout_ns;            // Exchange
  int64_t layer, forward_index;  // of the exchange that follows
  int64_t report;                // address of a FaultReport
  int64_t arenas[kMaxRanks];     // addresses, by rank
};

// A multiple of the alignment, so that arenas may be consecutive.
inline int64_t arena_bytes(int64_t world, int64_t capacity) {
  require(world >= 1 && world <= 1 << 12 && capacity >= 0 && capacity <= int64_t(1) << 31, "arena_bytes",
          "world", "is for ", world, " ranks and ", capacity, " packets; 1 to 2^12 and 0 to 2^31 expected");
  const int64_t bytes = int64_t(sizeof(Arena)) + Inbox{world, capacity}.packets() * int64_t(sizeof(Packet));
  return (bytes + alignof(Arena) - 1) / alignof(Arena) * alignof(Arena);
}

inline bool is_double(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double;
}

// This rank's numbers are moments, `[2C + 2]`, or sums, `[1, 2C]`. The op returns the group's moments, or two
// rows of sums, this rank's and the group's.
inline NumberKind number_kind_of(const Tensor& numbers) {
  return numbers.dim() == 1 ? kMoments : kSums;
}

inline void check_numbers(const char* op, const Tensor& numbers) {
  const int64_t n = numbers.dim() ? numbers.size(numbers.dim() - 1) : 0;
  require((numbers.scalar_type() == ScalarType::Float || is_double(numbers)) && numbers.is_contiguous() &&
              (numbers.dim() == 1 || (numbers.dim() == 2 && numbers.size(0) == 1)) && n >= 2 && n % 2 == 0,
          op, "numbers", "is ", toString(numbers.scalar_type()), " ", PrintShape{numbers},
          "; moments (2C + 2,) or sums (1, 2C) expected, contiguous, float32 or float64");
  check_storage(op, "numbers", numbers);
}

// A new tensor for the group's moments, or for two rows of sums.
inline Tensor new_group_result(const Tensor& numbers) {
  const int64_t n = numbers.size(numbers.dim() - 1);
  return number_kind_of(numbers) == kMoments ? torch::stable::new_empty(numbers, {n})
                                             : torch::stable::new_empty(numbers, {2, n});
}

constexpr int64_t kFields = offsetof(ExchangeDescriptor, arenas) / sizeof(int64_t);

inline const ExchangeDescriptor& read_descriptor(const char* op, const Tensor& fields) {
  require(fields.scalar_type() == ScalarType::Long && fields.is_contiguous() && fields.is_cpu() &&
              fields.numel() >= kFields,
          op, "exchange", "is not a contiguous row of at least ", kFields, " int64 on the CPU");
  check_storage(op, "exchange", fields);
  const ExchangeDescriptor& descriptor = *static_cast<const ExchangeDescriptor*>(fields.data_ptr());
  require(descriptor.world >= 1 && descriptor.rank >= 0 && descriptor.rank < descriptor.world &&
              descriptor.capacity > 0 &&
              (fields.numel() == kFields || fields.numel() == kFields + descriptor.world),
          op, "exchange", "has rank ", descriptor.rank, " of ", descriptor.world, ", capacity ",
          descriptor.capacity, ", ", fields.numel(), " numbers");
  // A collective has its capacity in numbers, and any number of ranks.
  require(descriptor.world <= kMaxElements && descriptor.capacity <= int64_t(1) << 31, op, "exchange",
          "is for ", descriptor.world, " ranks, capacity ", descriptor.capacity,
          "; at most 2^48 and 2^31 expected");
  return descriptor;
}

// The tag of a message of `n` numbers.
inline Tag tag_of(const ExchangeDescriptor& descriptor, int64_t n, ScalarType dtype, NumberKind kind) {
  const bool wide = dtype == ScalarType::Double;
  return {uint32_t(descriptor.layer), uint32_t(descriptor.forward_index), uint32_t(wide ? 2 * n : n),
          uint32_t(kind) | (wide ? uint32_t(kFloat64) : 0u)};
}

// Checks `exchange` for `n` numbers of `dtype`, and returns its fields.
inline Exchange make_exchange(const char* op, const Tensor& fields, int64_t n, ScalarType dtype,
                              NumberKind kind) {
  const ExchangeDescriptor& descriptor = read_descriptor(op, fields);
  require(fields.numel() > kFields && descriptor.world <= kMaxRanks, op, "exchange", "has ", descriptor.world,
          " ranks and no peer memory; at most ", kMaxRanks, " ranks with their arenas expected");
  const Tag tag = tag_of(descriptor, n, dtype, kind);
  require(n > 0 && n % 2 == 0 && tag.words / 2 <= descriptor.capacity, op, "exchange", "takes ",
          tag.words / 2, " packets of ", n, " numbers; 1 to ", descriptor.capacity,
          " expected, the capacity, and pairs");
  Exchange exchange;
  exchange.world = int(descriptor.world);
  exchange.rank = int(descriptor.rank);
  exchange.capacity = descriptor.capacity;
  exchange.timeout_ns = uint64_t(descriptor.timeout_ns);
  exchange.tag = tag;
  exchange.report = reinterpret_cast<FaultReport*>(descriptor.report);
  for (int64_t r = 0; r < descriptor.world; ++r)
    exchange.arenas[r] = reinterpret_cast<Arena*>(descriptor.arenas[r]);
  return exchange;
}

}  // namespace fastvit::peer
