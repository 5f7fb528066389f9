// One exchange of the peer protocol (peer.h) as a kernel on a GPU gets it: who the ranks are, where their
// memory is, what the messages are called. In the ops it is `exchange`, a row of int64 on the CPU, which
// fastvit/statistics/device_memory.py fills in the order of the enum in namespace field.
#pragma once

#include <algorithm>

#include "checks.h"
#include "peer.h"

namespace fastvit::peer {

constexpr int kMostRanks = 16;  // pointers that fit beside a kernel's other arguments

// What a rank owns of a group's memory; behind it lies its inbox. All of it is zero at first.
struct alignas(128) Arena {
  // Of the rank itself. One kernel reads what only the other writes, so no block can see it change: the one
  // that pushes takes the epoch after `polled` and leaves it in `pushed`, the one that polls the reverse.
  uint32_t pushed, polled;
  uint32_t generation;  // exchanges given up, as the ranks agreed when they last rejoined
  uint32_t abandoned;   // not 0: an exchange was given up, and nothing is sent or awaited until they rejoin
  uint64_t ended;       // {epoch, fault} of the last exchange that ended for all blocks alike
  // By rank, and stored by it: {generation, epoch} of the exchange that it gave up last.
  uint64_t gave_up[kMostRanks];
};

struct Exchange {
  int world = 0;  // 0: nothing is exchanged
  int rank = 0;
  int64_t capacity = 0;  // of a message, in packets
  uint64_t timeout = 0;  // in nanoseconds
  Tag tag{};
  Report* report = nullptr;  // in host memory that the device sees
  Arena* arenas[kMostRanks] = {};

  FASTVIT_INLINE Arena& own() const { return *arenas[rank]; }
  FASTVIT_INLINE Packet* message(int receiver, int sender, uint32_t epoch) const {
    return reinterpret_cast<Packet*>(arenas[receiver] + 1) + Inbox{world, capacity}.message(sender, epoch);
  }
};

inline int64_t arena_bytes(int64_t world, int64_t capacity) {
  check_room("exchange_arena_bytes", "world", world, capacity);
  return int64_t(sizeof(Arena)) + Inbox{world, capacity}.packets() * int64_t(sizeof(Packet));
}

// A message's payload is pairs: the two numbers of channel c, (mean, M2) or the two sums, are pair c, and the
// count of moments is the last. So who has a channel's numbers can send or take them alone.
namespace field {
enum { rank, world, capacity, layer, step, open, timeout, report, arenas };
}

// The argument `exchange` of an op that sends or takes `numbers` numbers of `dtype`. The field `open` says
// that an exchange was sent and not yet awaited.
inline Exchange exchange_of(const char* op, const Tensor& fields, int64_t numbers, ScalarType dtype,
                            uint32_t kind, bool sends) {
  require(fields.scalar_type() == ScalarType::Long && fields.is_contiguous() && fields.is_cpu() &&
              fields.numel() > field::arenas,
          op, "exchange", "is not a contiguous row of more than ", int(field::arenas), " int64 on the CPU");
  check_memory(op, "exchange", fields);
  int64_t* at = static_cast<int64_t*>(fields.data_ptr());
  const int64_t world = at[field::world], rank = at[field::rank], capacity = at[field::capacity];
  require(world >= 1 && world <= kMostRanks && rank >= 0 && rank < world && capacity > 0 &&
              fields.numel() == field::arenas + world,
          op, "exchange", "has rank ", rank, " of ", world, ", capacity ", capacity, ", ", fields.numel(),
          " numbers");
  require(bool(at[field::open]) != sends, op, "exchange",
          sends ? "was sent before and not awaited" : "was not sent; an op that sends it expected first");
  const bool is_double = dtype == ScalarType::Double;
  const int64_t words = numbers * (is_double ? 2 : 1);
  require(numbers > 0 && numbers % 2 == 0 && payload_packets(words) <= capacity, op, "exchange", "takes ",
          payload_packets(words), " packets of ", numbers, " numbers; 1 to ", capacity,
          " expected, the capacity, and pairs");
  at[field::open] = sends;
  Exchange exchange;
  exchange.world = int(world);
  exchange.rank = int(rank);
  exchange.capacity = capacity;
  exchange.timeout = uint64_t(at[field::timeout]);
  exchange.tag = {uint32_t(at[field::layer]), uint32_t(at[field::step]), uint32_t(words),
                  kind | (is_double ? uint32_t(kDouble) : 0u)};
  exchange.report = reinterpret_cast<Report*>(at[field::report]);
  for (int64_t r = 0; r < world; ++r) exchange.arenas[r] = reinterpret_cast<Arena*>(at[field::arenas + r]);
  return exchange;
}

}  // namespace fastvit::peer
