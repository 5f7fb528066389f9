// The peer protocol (protocol.h) between CPU processes of one host. Each process has mapped the arenas of
// all ranks: shared memory with an inbox, to which the other ranks, its peers, write their messages.
//
// Memory:  a message is a header of packets with the exchange's epoch, and a payload: the op's numbers as
//          they are. The sender copies the payload into each peer's inbox and writes the header afterwards.
//          The receiver merges the payload where it lies, so a cache line crosses between cores once. A
//          release fence before the header and an acquire fence after it order the two; on x86 they cost
//          nothing.
// Waiting: in slices of time. Between two slices Python handles signals and looks for peers that have
//          ended. Within a slice the thread spins for about as long as a running peer takes, then yields its
//          core, then sleeps.
#include "cpu_exchange.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "../moments.h"

namespace fastvit {
namespace {

using namespace peer;
using Clock = std::chrono::steady_clock;

uint64_t load_relaxed(const uint64_t& word) {
  return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

void store_packet(Packet* destination, const Packet& packet) {
  const auto halves = std::bit_cast<std::array<uint64_t, 2>>(packet);
  uint64_t* words = reinterpret_cast<uint64_t*>(destination);
  __atomic_store_n(words, halves[0], __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, halves[1], __ATOMIC_RELAXED);
}

Packet load_packet(const Packet* source) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(source);
  return std::bit_cast<Packet>(std::array<uint64_t, 2>{load_relaxed(words[0]), load_relaxed(words[1])});
}

// Where the receiver's inbox has the sender's message. The capacity counts a GPU's packets, half of which
// are epochs; a CPU's payload has no epochs, so it fits into half as many.
Packet* inbox_slot(const Exchange& exchange, int receiver, int sender, uint32_t epoch) {
  const InboxLayout inbox{exchange.world, (exchange.capacity + 1) / 2};
  return reinterpret_cast<Packet*>(exchange.arenas[receiver] + 1) + inbox.slot_offset(sender, epoch);
}

// A slice of time in which a thread waits.
class WaitSlice {
 public:
  // A thread spins only if every rank can have a core.
  WaitSlice(uint64_t timeout_ns, int ranks)
      : begin_(Clock::now()),
        slice_seconds_(double(timeout_ns) * 1e-9),
        spin_seconds_(ranks <= core_count() ? kSpinSeconds : 0) {}

  // Waits for a moment. Returns false when the slice is over.
  bool wait() {
    if (++rounds_ % 64 == 0 || phase_ != Phase::spin) {
      const double waited = std::chrono::duration<double>(Clock::now() - begin_).count();
      if (waited >= slice_seconds_) return false;
      phase_ = waited < spin_seconds_        ? Phase::spin
               : waited < kYieldUntilSeconds ? Phase::yield
                                             : Phase::sleep;
    }
    if (phase_ == Phase::spin)
      pause_core();
    else if (phase_ == Phase::yield)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kSleep);
    return true;
  }

 private:
  enum class Phase { spin, yield, sleep };
  static constexpr double kSpinSeconds = 5e-6, kYieldUntilSeconds = 2e-3;  // seconds since the wait began
  static constexpr std::chrono::microseconds kSleep{50};

  static void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static int64_t core_count() {  // of this process's affinity mask
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  Clock::time_point begin_;
  double slice_seconds_, spin_seconds_;
  int rounds_ = 0;
  Phase phase_ = Phase::spin;
};

// Merges the numbers of all ranks in rank order and in double. numbers_of(rank) points to the numbers of a
// rank; `result` may be one of these places. A block of channels is large enough that a rank's numbers are
// read in runs of pages, and small enough that its results stay in a core's cache.
template <class A, class NumbersOf>
void merge_in_rank_order(const NumbersOf& numbers_of, int64_t world, NumberKind kind, int64_t C, A* result) {
  constexpr int64_t kBlock = 1024;
  double total_count = 0;
  for (int64_t rank = 0; rank < world && kind == kMoments; ++rank)
    total_count += unpack_count(numbers_of(rank) + 2 * C);
  for (int64_t begin = 0; begin < C; begin += kBlock) {
    const int64_t channels = std::min(kBlock, C - begin);
    // Means and M2 of the ranks so far, or their first and second sums.
    double first[kBlock] = {}, second[kBlock] = {}, count = 0;
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

// Ends an exchange by a fault: writes its report, and NaN to the `n` numbers of its result.
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
        kind_(NumberKind(exchange.tag.kind & kSums)),
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

  // Waits for one slice of time, and merges the messages when all of them have arrived.
  void receive() {
    // A bit for each rank whose header has not arrived.
    uint64_t missing = (exchange_.world == 64 ? 0 : uint64_t(1) << exchange_.world) - 1;
    missing &= ~(uint64_t(1) << exchange_.rank);
    WaitSlice slice(exchange_.timeout_ns, exchange_.world);
    while (true) {
      ExchangeState fault = kPending;
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
      if (!slice.wait()) return;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    merge();  // reads this slot before the next send, after which the peers may overwrite it
    exchange_.own_arena().epoch = epoch_;
  }

 private:
  const Exchange& exchange_;
  const A* own_numbers_;
  A* result_;
  const int64_t C_;
  const NumberKind kind_;
  const int64_t n_;  // numbers of a rank
  const uint32_t epoch_;

  const Packet* message_of(int peer) const { return inbox_slot(exchange_, exchange_.rank, peer, epoch_); }

  // Returns whether the header of the peer has arrived.
  bool load_header(int peer, Tag& peer_tag) const {
    const Packet packet0 = load_packet(message_of(peer)), packet1 = load_packet(message_of(peer) + 1);
    peer_tag = tag_from_header(packet0, packet1);
    return has_arrived(packet0, epoch_) && has_arrived(packet1, epoch_);
  }

  // Whether a peer has abandoned this exchange, or while messages are missing any exchange.
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
// numbers. A result of sums has two rows. Moments are merged in place, so both pointers are the same.
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
          ") or wider expected, contiguous, of an even width");
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
  // make_exchange checks a number of numbers, which plays no role here; 2 is always valid.
  const Exchange group_exchange =
      make_exchange("exchange_abandon", exchange, /*n=*/2, ScalarType::Float, kMoments);
  Arena& own_arena = group_exchange.own_arena();
  const uint32_t epoch = next_epoch(own_arena.epoch);
  group_exchange.report->epoch = epoch;
  own_arena.failed = 1;
  for (int peer = 0; peer < group_exchange.world; ++peer)
    if (peer != group_exchange.rank)
      __atomic_store_n(&group_exchange.arenas[peer]->abandoned_epoch_of[group_exchange.rank], uint64_t(epoch),
                       __ATOMIC_RELEASE);
}

}  // namespace fastvit
