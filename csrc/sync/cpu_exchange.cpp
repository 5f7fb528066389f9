// The peer protocol (protocol.h) between CPU processes of one host, the ranks of a process group. Each rank
// has an arena: shared memory with an inbox, to which the other ranks, its peers, write their messages. Each
// rank has mapped the arenas of all ranks. An exchange merges the numbers of all ranks: moments, `[2C + 2]`
// (mean[C], M2[C] and the count, stored as two numbers), or two sums of each of C channels.
//
// Memory:  a message is a header and a payload. The header is two packets with the tag, by which ranks see
//          that they are in the same exchange; each packet has two words of the tag, and after each word the
//          epoch, the number of the exchange. The payload is the op's numbers as they are. The sender copies
//          the payload into each peer's inbox and writes the header afterwards. The receiver merges the
//          payload where it lies, so a cache line crosses between cores once. A release fence before the
//          header is written, and an acquire fence after it is read, order header and payload; on x86 the
//          fences cost nothing.
// Waiting: after some time (TimedWait) an op returns to Python, even if messages are missing. Python handles
//          signals, looks for peers that have ended, and calls exchange_wait to wait again.
#include "cpu_exchange.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "../moments.h"
#include "timed_wait.h"

namespace fastvit {
namespace {

using namespace peer;

uint64_t load_relaxed(const uint64_t& value) {
  return __atomic_load_n(&value, __ATOMIC_RELAXED);
}

void store_packet(Packet* destination, const Packet& packet) {
  const auto halves = std::bit_cast<std::array<uint64_t, 2>>(packet);
  uint64_t* stored_halves = reinterpret_cast<uint64_t*>(destination);
  __atomic_store_n(stored_halves, halves[0], __ATOMIC_RELAXED);
  __atomic_store_n(stored_halves + 1, halves[1], __ATOMIC_RELAXED);
}

Packet load_packet(const Packet* source) {
  const uint64_t* halves = reinterpret_cast<const uint64_t*>(source);
  return std::bit_cast<Packet>(std::array<uint64_t, 2>{load_relaxed(halves[0]), load_relaxed(halves[1])});
}

// Returns the beginning of the message of `sender` in the inbox of `receiver`. exchange.capacity is the
// largest payload in packets of a GPU, in which every second word is an epoch. A CPU's payload has no epochs,
// so it takes half as many packets.
Packet* inbox_slot(const Exchange& exchange, int receiver, int sender, uint32_t epoch) {
  const InboxLayout inbox{exchange.world, (exchange.capacity + 1) / 2};
  return reinterpret_cast<Packet*>(exchange.arenas[receiver] + 1) + inbox.slot_offset(sender, epoch);
}

// Merges the numbers of all ranks in rank order and in double. numbers_of(rank) points to the numbers of a
// rank; `result` may be the numbers of one rank. The numbers of kChannelsTogether channels are read in long
// runs, each a page of floats, and their merged numbers stay in a core's cache.
// A: float or double, the type of the numbers.
template <class A, class NumbersOf>
void merge_in_rank_order(const NumbersOf& numbers_of, int64_t world, NumberKind kind, int64_t C, A* result) {
  constexpr int64_t kChannelsTogether = 1024;
  double total_count = 0;
  for (int64_t rank = 0; rank < world && kind == kMoments; ++rank)
    total_count += unpack_count(numbers_of(rank) + 2 * C);
  for (int64_t begin = 0; begin < C; begin += kChannelsTogether) {
    const int64_t channels = std::min(kChannelsTogether, C - begin);
    // Means and M2 of the ranks so far, or their first and second sums.
    double first[kChannelsTogether] = {}, second[kChannelsTogether] = {}, count = 0;
    for (int64_t rank = 0; rank < world; ++rank) {
      const A *rank_first = numbers_of(rank) + begin, *rank_second = rank_first + C;
      if (kind == kMoments) {
        const double rank_count = unpack_count(numbers_of(rank) + 2 * C);
        const MergeWeights weights = MergeWeights::from_counts(count, rank_count);
        for (int64_t i = 0; i < channels; ++i)
          weights.merge(first[i], second[i], rank_first[i], rank_second[i]);
        count += rank_count;
      } else {
        for (int64_t i = 0; i < channels; ++i) first[i] += rank_first[i], second[i] += rank_second[i];
      }
    }
    for (int64_t i = 0; i < channels; ++i) {
      result[begin + i] = A(first[i]);
      result[C + begin + i] = A(second[i]);
    }
  }
  if (kind == kMoments) pack_count(result + 2 * C, total_count);
}

// Ends an exchange after a fault: writes the report, which Python raises as an error, and NaN to the `n`
// numbers of the result.
template <class A>
void report_fault(FaultReport& report, const FaultReport& fault, A* result, int64_t n) {
  std::fill_n(result, n, std::numeric_limits<A>::quiet_NaN());
  report = fault;
}

// One exchange of one rank. A: float or double, the type of the numbers.
template <class A>
class CpuExchange {
 public:
  // `result` gets the merged numbers; it may be `own_numbers`.
  CpuExchange(const Exchange& exchange, const A* own_numbers, A* result, int64_t channels)
      : exchange_(exchange),
        own_numbers_(own_numbers),
        result_(result),
        C_(channels),
        kind_(number_kind_of(exchange.tag)),
        n_(2 * (channels + (kind_ == kMoments))),
        epoch_(next_epoch(exchange.own_arena().epoch)) {}

  void send() const {
    // The first receiver is the next rank, so that ranks do not all write to one inbox.
    for (int turn = 1; turn < exchange_.world; ++turn) {
      const int receiver = (exchange_.rank + turn) % exchange_.world;
      Packet* slot = inbox_slot(exchange_, receiver, exchange_.rank, epoch_);
      std::memcpy(slot + kHeaderPackets, own_numbers_, n_ * sizeof(A));
      __atomic_thread_fence(__ATOMIC_RELEASE);
      for (int64_t i = 0; i < kHeaderPackets; ++i)
        store_packet(slot + i, header_packet(exchange_.tag, i, epoch_));
    }
  }

  // Waits for at most timeout_ns, and merges the messages when all of them have arrived.
  void receive() {
    // A bit for each rank whose header has not arrived. A shift by 64 is undefined; 0 - 1 has all 64 bits.
    uint64_t missing = (exchange_.world == 64 ? 0 : uint64_t(1) << exchange_.world) - 1;
    missing &= ~(uint64_t(1) << exchange_.rank);
    TimedWait timed_wait(exchange_.timeout_ns, exchange_.world);
    while (true) {
      ExchangeState fault = kPending;  // no fault yet
      for (uint64_t left = missing; left && !fault; left &= left - 1) {
        const int peer = std::countr_zero(left);
        Tag peer_tag;
        if (!load_header(peer, peer_tag)) continue;
        missing &= ~(uint64_t(1) << peer);
        if (!(peer_tag == exchange_.tag)) fault = fail(kMismatch, peer, peer_tag);
      }
      for (int peer = 0; peer < exchange_.world && !fault; ++peer)
        if (has_abandoned(peer, missing == 0)) fault = fail(kPeerAbandoned, peer);
      exchange_.report->missing_ranks_mask = fault ? 0 : missing;
      if (fault) return;
      if (missing == 0) break;
      if (!timed_wait.keep_waiting()) return;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    merge();  // before this rank's next message, which lets the peers write to these slots again
    exchange_.own_arena().epoch = epoch_;
  }

 private:
  const Exchange& exchange_;
  const A* own_numbers_;
  A* result_;
  const int64_t C_;
  const NumberKind kind_;
  const int64_t n_;       // how many numbers each rank has
  const uint32_t epoch_;  // of this exchange

  const Packet* message_of(int peer) const { return inbox_slot(exchange_, exchange_.rank, peer, epoch_); }

  // Reads the header of the peer's message to `peer_tag`. Returns whether the header has arrived.
  bool load_header(int peer, Tag& peer_tag) const {
    const Packet packet0 = load_packet(message_of(peer)), packet1 = load_packet(message_of(peer) + 1);
    peer_tag = tag_from_header(packet0, packet1);
    return has_arrived(packet0, epoch_) && has_arrived(packet1, epoch_);
  }

  // Whether a peer has abandoned (given up) this exchange or, if messages are still missing, any exchange:
  // such a peer sends no more messages.
  bool has_abandoned(int peer, bool is_complete) const {
    const uint64_t abandoned_epoch = load_relaxed(exchange_.own_arena().abandoned_epoch_of[peer]);
    return abandoned_epoch != 0 && (!is_complete || abandoned_epoch == epoch_);
  }

  ExchangeState fail(ExchangeState fault, int peer, const Tag& peer_tag = {}) const {
    report_fault(*exchange_.report,
                 {.fault = fault,
                  .rank = uint32_t(exchange_.rank),
                  .peer = uint32_t(peer),
                  .epoch = epoch_,
                  .own_tag = exchange_.tag,
                  .peer_tag = peer_tag,
                  .missing_ranks_mask = 0},
                 result_, n_);
    return fault;
  }

  void merge() const {
    const auto numbers_of = [&](int64_t rank) {
      return rank == exchange_.rank ? own_numbers_
                                    : reinterpret_cast<const A*>(message_of(int(rank)) + kHeaderPackets);
    };
    merge_in_rank_order(numbers_of, exchange_.world, kind_, C_, result_);
  }
};

// Calls f(own_numbers, merged, C) with two pointers into an op's result, which begins with this rank's
// numbers. A result of sums has two rows: this rank's sums, then the total. Moments are merged in place, so
// both pointers are the same.
template <class F>
void dispatch_result(const Tensor& result, NumberKind kind, const F& f) {
  const int64_t n = numbers_per_rank(result);
  dispatch_accumulation(result.scalar_type(), [&]<class A>() {
    A* const own_numbers = static_cast<A*>(result.data_ptr());
    kind == kMoments ? f(own_numbers, own_numbers, n / 2 - 1) : f(own_numbers, own_numbers + n, n / 2);
  });
}

Tensor new_result_with_own_numbers(const Tensor& numbers) {
  Tensor result = new_group_result(numbers);
  std::memcpy(result.data_ptr(), numbers.data_ptr(), numbers.numel() * numbers.element_size());
  return result;
}

}  // namespace

template <class A>
void exchange_numbers(const Exchange& exchange, const A* own_numbers, A* result, int64_t channels) {
  CpuExchange<A> cpu_exchange(exchange, own_numbers, result, channels);
  cpu_exchange.send();
  cpu_exchange.receive();
}

template void exchange_numbers(const Exchange&, const float*, float*, int64_t);
template void exchange_numbers(const Exchange&, const double*, double*, int64_t);

Tensor exchange_merge(Tensor numbers, Tensor exchange) {
  check_numbers("exchange_merge", numbers);
  const NumberKind kind = number_kind_of(numbers);
  const Exchange group_exchange =
      make_exchange("exchange_merge", exchange, numbers_per_rank(numbers), numbers.scalar_type(), kind);
  Tensor result = new_result_with_own_numbers(numbers);
  dispatch_result(result, kind, [&]<class A>(A* own_numbers, A* merged, int64_t C) {
    exchange_numbers(group_exchange, own_numbers, merged, C);
  });
  return result;
}

Tensor merge_received(Tensor messages, Tensor numbers, Tensor exchange) {
  const char* const op = "merge_received";
  check_numbers(op, numbers);
  const ExchangeDescriptor& descriptor = read_descriptor(op, exchange);
  const NumberKind kind = number_kind_of(numbers);
  const int64_t n = numbers_per_rank(numbers);
  const Tag own_tag = make_tag(descriptor, n, numbers.scalar_type(), kind);
  constexpr int64_t kHeaderWords = sizeof(Tag) / sizeof(int32_t);
  require(messages.scalar_type() == ScalarType::Int && messages.is_contiguous() && messages.dim() == 2 &&
              messages.size(0) == descriptor.world - 1 && messages.size(1) >= kHeaderWords + own_tag.words &&
              messages.size(1) % 2 == 0,
          op, "messages", "is ", toString(messages.scalar_type()), " ", PrintShape{messages}, "; Int (",
          descriptor.world - 1, ", ", kHeaderWords + own_tag.words,
          ") or wider expected, contiguous, of an even width");  // so that doubles in each row are aligned
  check_storage_size(op, "messages", messages);
  const auto message_of = [&](int64_t peer) {
    const int64_t row = peer > descriptor.rank ? peer - 1 : peer;  // this rank has no row
    return static_cast<const int32_t*>(messages.data_ptr()) + row * messages.size(1);
  };
  Tensor result = new_result_with_own_numbers(numbers);
  dispatch_result(result, kind, [&]<class A>(A* own_numbers, A* merged, int64_t C) {
    for (int64_t peer = 0; peer < descriptor.world; ++peer) {
      if (peer == descriptor.rank) continue;
      Tag peer_tag;
      std::memcpy(&peer_tag, message_of(peer), sizeof(Tag));
      if (peer_tag == own_tag) continue;
      report_fault(*reinterpret_cast<FaultReport*>(descriptor.report),
                   {.fault = kMismatch,
                    .rank = uint32_t(descriptor.rank),
                    .peer = uint32_t(peer),
                    .epoch = 0,
                    .own_tag = own_tag,
                    .peer_tag = peer_tag,
                    .missing_ranks_mask = 0},
                   merged, n);
      return;
    }
    const auto numbers_of = [&](int64_t rank) {
      return rank == descriptor.rank ? own_numbers
                                     : reinterpret_cast<const A*>(message_of(rank) + kHeaderWords);
    };
    merge_in_rank_order(numbers_of, descriptor.world, kind, C, merged);
  });
  return result;
}

void exchange_wait(Tensor result, Tensor exchange) {
  const NumberKind kind = number_kind_of(result);
  require(result.is_contiguous() && (kind == kMoments || (result.dim() == 2 && result.size(0) == 2)),
          "exchange_wait", "result", "has shape ", PrintShape{result}, "; (2C + 2,) or (2, 2C) expected");
  check_storage_size("exchange_wait", "result", result);
  const Exchange group_exchange =
      make_exchange("exchange_wait", exchange, numbers_per_rank(result), result.scalar_type(), kind);
  dispatch_result(result, kind, [&]<class A>(A* own_numbers, A* merged, int64_t C) {
    CpuExchange<A>(group_exchange, own_numbers, merged, C).receive();
  });
}

void exchange_abandon(Tensor exchange) {
  // make_exchange needs a valid count of numbers, which is not used here.
  const Exchange group_exchange =
      make_exchange("exchange_abandon", exchange, /*n=*/2, ScalarType::Float, kMoments);
  Arena& own_arena = group_exchange.own_arena();
  const uint32_t epoch = next_epoch(own_arena.epoch);
  group_exchange.report->epoch = epoch;
  own_arena.failed = 1;  // as protocol.h says; the ops on a CPU do not read it
  for (int peer = 0; peer < group_exchange.world; ++peer)
    if (peer != group_exchange.rank)
      __atomic_store_n(&group_exchange.arenas[peer]->abandoned_epoch_of[group_exchange.rank], uint64_t(epoch),
                       __ATOMIC_RELEASE);
}

}  // namespace fastvit
