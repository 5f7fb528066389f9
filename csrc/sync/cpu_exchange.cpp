// The peer protocol between processes of one host, over arenas in shared memory that each has mapped.
// protocol.h defines the protocol; fastvit/sync/transport.py, cpu_peer.py and collective.py call these ops.
//
// Memory   the payload is the op's row of numbers without flags, 4 bytes per float. A push copies it into
// each
//          peer's inbox, and then writes the header in front of it. The merge reads it there, so each cache
//          line crosses between cores once. A release fence before the header and an acquire fence after it
//          order them; on x86 they cost nothing.
// Waiting  in slices of time: between slices Python handles signals and checks for dead peers. Within a slice
//          the thread spins for about the delay of a running peer, then yields (a peer may need this core),
//          then sleeps.
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

template <class Word>
Word load(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

void store_packet(Packet* to, const Packet& packet) {
  const auto halves = std::bit_cast<std::array<uint64_t, 2>>(packet);
  uint64_t* words = reinterpret_cast<uint64_t*>(to);
  __atomic_store_n(words, halves[0], __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, halves[1], __ATOMIC_RELAXED);
}

Packet load_packet(const Packet* from) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(from);
  return std::bit_cast<Packet>(std::array<uint64_t, 2>{load(words[0]), load(words[1])});
}

// A payload without flags takes half of a GPU's packets.
Packet* inbox_message(const Exchange& exchange, int receiver, int sender, uint32_t epoch) {
  const Inbox inbox{exchange.world, (exchange.capacity + 1) / 2};
  return reinterpret_cast<Packet*>(exchange.arenas[receiver] + 1) + inbox.message(sender, epoch);
}

// Spins, then yields, then sleeps; false when the slice is over.
class WaitSlice {
 public:
  WaitSlice(uint64_t timeout_ns, int ranks)
      : begin_(Clock::now()), slice_(double(timeout_ns) * 1e-9), spin_(ranks <= cores() ? kSpinSeconds : 0) {}

  bool wait() {
    if (++rounds_ % 64 == 0 || phase_ != Phase::spin) {
      const double waited = std::chrono::duration<double>(Clock::now() - begin_).count();
      if (waited >= slice_) return false;
      phase_ = waited < spin_ ? Phase::spin : waited < kYieldUntilSeconds ? Phase::yield : Phase::sleep;
    }
    if (phase_ == Phase::spin)
      pause();
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

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static int64_t cores() {  // cores of this process's affinity mask
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  Clock::time_point begin_;
  double slice_, spin_;
  int rounds_ = 0;
  Phase phase_ = Phase::spin;
};

// Merges the rows of all ranks in rank order and in double, a block of channels at a time. A block is large
// enough that a row is read in runs of pages, and small enough that its sums stay in a core's cache. `result`
// may be one of the rows.
template <class A, class Row>
void merge_in_rank_order(const Row& row, int64_t world, bool moments, int64_t C, A* result) {
  constexpr int64_t kBlock = 1024;
  double count = 0;
  for (int64_t rank = 0; rank < world && moments; ++rank) count += unpack_count(row(rank) + 2 * C);
  for (int64_t begin = 0; begin < C; begin += kBlock) {
    const int64_t columns = std::min(kBlock, C - begin);
    double first[kBlock] = {}, second[kBlock] = {}, before = 0;
    for (int64_t rank = 0; rank < world; ++rank) {
      const A *one = row(rank) + begin, *two = one + C;
      if (moments) {
        const double theirs = unpack_count(row(rank) + 2 * C);
        const MergeWeights weights = MergeWeights::of_counts(before, theirs);
        for (int64_t i = 0; i < columns; ++i) weights.merge(first[i], second[i], one[i], two[i]);
        before += theirs;
      } else {
        for (int64_t i = 0; i < columns; ++i) first[i] += one[i], second[i] += two[i];
      }
    }
    for (int64_t i = 0; i < columns; ++i) {
      result[begin + i] = A(first[i]);
      result[C + begin + i] = A(second[i]);
    }
  }
  if (moments) pack_count(result + 2 * C, count);
}

template <class A>
void report_fault(FaultReport& report, const FaultReport& found, A* result, int64_t numbers) {
  std::fill_n(result, numbers, std::numeric_limits<A>::quiet_NaN());
  report = found;
}

// One exchange of one rank.
template <class A>
class CpuExchange {
 public:
  CpuExchange(const Exchange& exchange, const A* own, A* result, int64_t channels)
      : exchange_(exchange),
        own_(own),
        result_(result),
        C_(channels),
        moments_((exchange.tag.kind & kSums) == 0),
        numbers_(2 * (channels + moments_)),
        epoch_(next_epoch(exchange.own_arena().epoch)) {}

  void push() const {
    // From the next rank on, so that ranks do not all write to one inbox.
    for (int turn = 1; turn < exchange_.world; ++turn) {
      Packet* to =
          inbox_message(exchange_, (exchange_.rank + turn) % exchange_.world, exchange_.rank, epoch_);
      std::memcpy(to + kHeaderPackets, own_, numbers_ * sizeof(A));
      __atomic_thread_fence(__ATOMIC_RELEASE);
      for (int64_t i = 0; i < kHeaderPackets; ++i)
        store_packet(to + i, header_packet(exchange_.tag, i, epoch_));
    }
  }

  void await() {
    uint64_t missing = (exchange_.world == 64 ? 0 : uint64_t(1) << exchange_.world) - 1;
    missing &= ~(uint64_t(1) << exchange_.rank);
    WaitSlice backoff(exchange_.timeout_ns, exchange_.world);
    while (true) {
      ExchangeState fault = kPending;
      for (uint64_t left = missing; left && !fault; left &= left - 1) {
        const int peer = std::countr_zero(left);
        Tag theirs;
        if (!header(peer, theirs)) continue;
        missing &= ~(uint64_t(1) << peer);
        if (!(theirs == exchange_.tag)) fault = fail(kMismatch, peer, theirs);
      }
      for (int peer = 0; peer < exchange_.world && !fault; ++peer)
        if (gave_up(peer, missing == 0)) fault = fail(kPeerAbandoned, peer);
      exchange_.report->missing_ranks_mask = fault ? 0 : missing;
      if (fault) return;
      if (missing == 0) break;
      if (!backoff.wait()) return;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    merge();  // ends before the next push, after which the peers reuse this slot
    exchange_.own_arena().epoch = epoch_;
  }

 private:
  const Exchange& exchange_;
  const A* own_;
  A* result_;
  const int64_t C_;
  const bool moments_;
  const int64_t numbers_;
  const uint32_t epoch_;

  const Packet* message(int peer) const { return inbox_message(exchange_, exchange_.rank, peer, epoch_); }

  bool header(int peer, Tag& theirs) const {
    const Packet first = load_packet(message(peer)), second = load_packet(message(peer) + 1);
    theirs = tag_from_header(first, second);
    return arrived(first, epoch_) && arrived(second, epoch_);
  }

  // Whether a peer gave up this exchange, or any exchange while this one is incomplete.
  bool gave_up(int peer, bool complete) const {
    const uint64_t at = load(exchange_.own_arena().abandoned_epoch_of[peer]);
    return at != 0 && (!complete || at == epoch_);
  }

  ExchangeState fail(ExchangeState fault, int peer, const Tag& theirs = {}) const {
    report_fault(*exchange_.report,
                 {fault, uint32_t(exchange_.rank), uint32_t(peer), epoch_, exchange_.tag, theirs, 0}, result_,
                 numbers_);
    return fault;
  }

  void merge() const {
    const auto row = [&](int64_t rank) {
      return rank == exchange_.rank ? own_ : reinterpret_cast<const A*>(message(int(rank)) + kHeaderPackets);
    };
    merge_in_rank_order(row, exchange_.world, moments_, C_, result_);
  }
};

// f(own, result, C) with the rows of an op's result.
template <class F>
void dispatch_numbers(const Tensor& result, NumberKind kind, const F& f) {
  const int64_t n = result.size(result.dim() - 1);
  dispatch_accumulation(result.scalar_type(), [&]<class A>() {
    A* const data = static_cast<A*>(result.data_ptr());
    kind == kMoments ? f(data, data, n / 2 - 1) : f(data, data + n, n / 2);
  });
}

// The result of an exchange, with this rank's numbers in their place.
Tensor new_result_with_own(const Tensor& numbers) {
  Tensor result = new_group_result(numbers);
  std::memcpy(result.data_ptr(), numbers.data_ptr(), numbers.numel() * numbers.element_size());
  return result;
}

}  // namespace

template <class A>
void exchange_numbers(const Exchange& exchange, const A* own, A* result, int64_t channels) {
  CpuExchange<A> sharing(exchange, own, result, channels);
  sharing.push();
  sharing.await();
}

template void exchange_numbers(const Exchange&, const float*, float*, int64_t);
template void exchange_numbers(const Exchange&, const double*, double*, int64_t);

Tensor exchange_merge(Tensor numbers, Tensor fields) {
  check_numbers("exchange_merge", numbers);
  const NumberKind kind = number_kind_of(numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  const Exchange exchange = make_exchange("exchange_merge", fields, n, numbers.scalar_type(), kind);
  Tensor result = new_result_with_own(numbers);
  dispatch_numbers(result, kind, [&]<class A>(A* own, A* merged, int64_t C) {
    exchange_numbers(exchange, own, merged, C);
  });
  return result;
}

Tensor merge_received(Tensor messages, Tensor numbers, Tensor fields) {
  const char* const op = "merge_received";
  check_numbers(op, numbers);
  const ExchangeDescriptor& descriptor = read_descriptor(op, fields);
  const NumberKind kind = number_kind_of(numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  const Tag mine = tag_of(descriptor, n, numbers.scalar_type(), kind);
  constexpr int64_t kHeader = sizeof(Tag) / sizeof(int32_t);
  require(messages.scalar_type() == ScalarType::Int && messages.is_contiguous() && messages.dim() == 2 &&
              messages.size(0) == descriptor.world - 1 && messages.size(1) >= kHeader + mine.words &&
              messages.size(1) % 2 == 0,
          op, "messages", "is ", toString(messages.scalar_type()), " ", PrintShape{messages}, "; Int (",
          descriptor.world - 1, ", ", kHeader + mine.words,
          ") or wider expected, contiguous, of an even width");
  check_storage(op, "messages", messages);
  const auto message = [&](int64_t rank) {
    return static_cast<const int32_t*>(messages.data_ptr()) +
           (rank - (rank > descriptor.rank)) * messages.size(1);
  };
  Tensor result = new_result_with_own(numbers);
  dispatch_numbers(result, kind, [&]<class A>(A* own, A* merged, int64_t C) {
    for (int64_t rank = 0; rank < descriptor.world; ++rank) {
      if (rank == descriptor.rank) continue;
      Tag theirs;
      std::memcpy(&theirs, message(rank), sizeof(Tag));
      if (theirs == mine) continue;
      report_fault(*reinterpret_cast<FaultReport*>(descriptor.report),
                   {kMismatch, uint32_t(descriptor.rank), uint32_t(rank), 0, mine, theirs, 0}, merged, n);
      return;
    }
    const auto row = [&](int64_t rank) {
      return rank == descriptor.rank ? own : reinterpret_cast<const A*>(message(rank) + kHeader);
    };
    merge_in_rank_order(row, descriptor.world, kind == kMoments, C, merged);
  });
  return result;
}

void exchange_wait(Tensor result, Tensor fields) {
  const NumberKind kind = number_kind_of(result);
  require(result.is_contiguous() && (kind == kMoments || (result.dim() == 2 && result.size(0) == 2)),
          "exchange_wait", "result", "has shape ", PrintShape{result}, "; (2C + 2,) or (2, 2C) expected");
  check_storage("exchange_wait", "result", result);
  const Exchange exchange =
      make_exchange("exchange_wait", fields, result.size(result.dim() - 1), result.scalar_type(), kind);
  dispatch_numbers(result, kind, [&]<class A>(A* own, A* merged, int64_t C) {
    CpuExchange<A>(exchange, own, merged, C).await();
  });
}

void exchange_abandon(Tensor fields) {
  const Exchange exchange = make_exchange("exchange_abandon", fields, 2, ScalarType::Float, kMoments);
  Arena& own = exchange.own_arena();
  const uint32_t epoch = next_epoch(own.epoch);
  exchange.report->epoch = epoch;
  own.failed = 1;
  for (int peer = 0; peer < exchange.world; ++peer)
    if (peer != exchange.rank)
      __atomic_store_n(&exchange.arenas[peer]->abandoned_epoch_of[exchange.rank], uint64_t(epoch),
                       __ATOMIC_RELEASE);
}

}  // namespace fastvit
