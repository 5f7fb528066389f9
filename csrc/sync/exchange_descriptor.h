// The ops' argument `exchange`: a group, as a row of int64 on the CPU, which ops only read. Faults are
// written to a FaultReport. The fields here and of FaultReport and Arena must equal those in
// fastvit/sync/protocol.py.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstddef>

#include "../op_checker.h"
#include "protocol.h"

namespace fastvit::peer {

struct Handle {
  int64_t rank, world;
  int64_t capacity;           // of a message: packets in peer memory, numbers in a collective
  int64_t wide;               // a collective's messages are float64
  int64_t nanoseconds;        // Exchange
  int64_t layer, step;        // of the exchange that follows
  int64_t report;             // address of a FaultReport
  int64_t arenas[kMaxRanks];  // addresses, by rank
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
inline Kind kind_of(const Tensor& numbers) {
  return numbers.dim() == 1 ? kMoments : kSums;
}

inline void check_numbers(const char* op, const Tensor& numbers) {
  const int64_t n = numbers.dim() ? numbers.size(numbers.dim() - 1) : 0;
  require((numbers.scalar_type() == ScalarType::Float || is_double(numbers)) && numbers.is_contiguous() &&
              (numbers.dim() == 1 || (numbers.dim() == 2 && numbers.size(0) == 1)) && n >= 2 && n % 2 == 0,
          op, "numbers", "is ", toString(numbers.scalar_type()), " ", ShapeOf{numbers},
          "; moments (2C + 2,) or sums (1, 2C) expected, contiguous, float32 or float64");
  check_memory(op, "numbers", numbers);
}

// A new tensor for the group's moments, or for two rows of sums.
inline Tensor shared_result(const Tensor& numbers) {
  const int64_t n = numbers.size(numbers.dim() - 1);
  return kind_of(numbers) == kMoments ? torch::stable::new_empty(numbers, {n})
                                      : torch::stable::new_empty(numbers, {2, n});
}

constexpr int64_t kFields = offsetof(Handle, arenas) / sizeof(int64_t);

inline const Handle& handle_of(const char* op, const Tensor& fields) {
  require(fields.scalar_type() == ScalarType::Long && fields.is_contiguous() && fields.is_cpu() &&
              fields.numel() >= kFields,
          op, "exchange", "is not a contiguous row of at least ", kFields, " int64 on the CPU");
  check_memory(op, "exchange", fields);
  const Handle& handle = *static_cast<const Handle*>(fields.data_ptr());
  require(handle.world >= 1 && handle.rank >= 0 && handle.rank < handle.world && handle.capacity > 0 &&
              (fields.numel() == kFields || fields.numel() == kFields + handle.world),
          op, "exchange", "has rank ", handle.rank, " of ", handle.world, ", capacity ", handle.capacity,
          ", ", fields.numel(), " numbers");
  // A collective has its capacity in numbers, and any number of ranks.
  require(handle.world <= kMaxElements && handle.capacity <= int64_t(1) << 31, op, "exchange", "is for ",
          handle.world, " ranks, capacity ", handle.capacity, "; at most 2^48 and 2^31 expected");
  return handle;
}

// The tag of a message of `n` numbers.
inline Tag tag_of(const Handle& handle, int64_t n, ScalarType dtype, Kind kind) {
  const bool wide = dtype == ScalarType::Double;
  return {uint32_t(handle.layer), uint32_t(handle.step), uint32_t(wide ? 2 * n : n),
          uint32_t(kind) | (wide ? uint32_t(kDouble) : 0u)};
}

// Checks `exchange` for `n` numbers of `dtype`, and returns its fields.
inline Exchange exchange_of(const char* op, const Tensor& fields, int64_t n, ScalarType dtype, Kind kind) {
  const Handle& handle = handle_of(op, fields);
  require(fields.numel() > kFields && handle.world <= kMaxRanks, op, "exchange", "has ", handle.world,
          " ranks and no peer memory; at most ", kMaxRanks, " ranks with their arenas expected");
  const Tag tag = tag_of(handle, n, dtype, kind);
  require(n > 0 && n % 2 == 0 && tag.words / 2 <= handle.capacity, op, "exchange", "takes ", tag.words / 2,
          " packets of ", n, " numbers; 1 to ", handle.capacity, " expected, the capacity, and pairs");
  Exchange exchange;
  exchange.world = int(handle.world);
  exchange.rank = int(handle.rank);
  exchange.capacity = handle.capacity;
  exchange.nanoseconds = uint64_t(handle.nanoseconds);
  exchange.tag = tag;
  exchange.report = reinterpret_cast<FaultReport*>(handle.report);
  for (int64_t r = 0; r < handle.world; ++r) exchange.arenas[r] = reinterpret_cast<Arena*>(handle.arenas[r]);
  return exchange;
}

}  // namespace fastvit::peer
