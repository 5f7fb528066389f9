// The peer protocol between processes of one host, over a segment of shared memory that each has mapped.
// What the protocol is stands in ../peer.h, who calls these ops in fastvit/statistics/shared_memory.py.
//
// Memory   segment: Status[world], then one inbox per rank. A push writes 16 bytes per two floats and peer, a
//          poll reads as many; a cache line crosses from one core to the other once.
// Waiting  in slices: the caller comes back for the next, so that Python sees signals and dead peers. Within
//          one it spins for as long as a peer that runs needs, then yields (its threads may want this core),
//          then sleeps. From a peer on the same core it moves away first: the two would run one after the
//          other from then on, and the system would take milliseconds to part them.
#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "../checks.h"
#include "../peer.h"
#include "peer_ops.h"

namespace fastvit {
namespace {

using namespace peer;
using Clock = std::chrono::steady_clock;

// One rank's side of a group: `state` in the ops is this, a tensor of int64 that lives in Python, and after
// it a flag per rank: its message is missing. fastvit/statistics/shared_memory.py names the fields in this
// order.
struct State {
  int64_t rank, world, capacity, epoch, generation, step;
  int64_t peer, peer_layer, peer_step, peer_words, peer_kind;  // what a fault was about
};
constexpr int64_t kStateNumbers = sizeof(State) / sizeof(int64_t);

uint64_t load(const uint64_t& word, int order = __ATOMIC_RELAXED) {
  return __atomic_load_n(&word, order);
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

// A segment as one rank sees it.
struct Segment {
  State* state;
  int64_t* missing;  // [world]
  Status* status;
  Packet* packets;
  Inbox inbox;

  Segment(const char* op, const Tensor& segment, const Tensor& state_tensor) {
    require(state_tensor.scalar_type() == ScalarType::Long && state_tensor.is_contiguous() &&
                state_tensor.numel() >= kStateNumbers,
            op, "state", "is not a contiguous tensor of ", kStateNumbers, " int64 and one per rank");
    check_memory(op, "state", state_tensor);
    state = static_cast<State*>(state_tensor.data_ptr());
    missing = reinterpret_cast<int64_t*>(state + 1);
    require(state->world > 1 && state->rank >= 0 && state->rank < state->world && state->capacity > 0 &&
                state_tensor.numel() == kStateNumbers + state->world,
            op, "state", "has rank ", state->rank, " of ", state->world, ", capacity ", state->capacity, ", ",
            state_tensor.numel(), " numbers");
    check_room(op, "state", state->world, state->capacity);
    inbox = {state->world, state->capacity};
    const int64_t bytes = peer_segment_bytes(state->world, state->capacity);
    require(segment.scalar_type() == ScalarType::Byte && segment.is_contiguous() && segment.numel() >= bytes,
            op, "segment", "has ", segment.numel(), " bytes; ", bytes, " expected, contiguous uint8");
    check_memory(op, "segment", segment);
    require(reinterpret_cast<uintptr_t>(segment.data_ptr()) % alignof(Status) == 0, op, "segment",
            "is not aligned to ", alignof(Status), " bytes");
    status = static_cast<Status*>(segment.data_ptr());
    packets = reinterpret_cast<Packet*>(status + state->world);
  }

  // A peer that gave up this exchange; unless it is complete, one that gave up any is as bad. -1: none.
  int64_t gave_up_peer(bool complete) const {
    for (int64_t peer = 0; peer < state->world; ++peer) {
      const uint64_t gave_up = load(status[peer].gave_up);
      if (gave_up >> 32 <= uint64_t(state->generation)) continue;
      if (!complete || uint32_t(gave_up) == uint32_t(state->epoch)) return peer;
    }
    return -1;
  }

  // Whether a rank was on this core when it last sent.
  bool is_here(int64_t peer) const { return load(status[peer].core) == uint64_t(sched_getcpu()) + 1; }

  Packet* message(int64_t receiver, int64_t sender) const {
    return packets + receiver * inbox.packets() + inbox.message(sender, uint32_t(state->epoch));
  }
};

struct Payload {
  const uint32_t* words;
  int64_t count;
};

Payload payload_of(const char* op, const Tensor& numbers, const Segment& segment) {
  const bool is_double = numbers.scalar_type() == ScalarType::Double;
  require((is_double || numbers.scalar_type() == ScalarType::Float) && numbers.dim() == 1 &&
              numbers.is_contiguous(),
          op, "numbers", "is ", toString(numbers.scalar_type()), " ", shape_of(numbers),
          "; one contiguous row of float32 or float64 expected");
  check_memory(op, "numbers", numbers);
  const int64_t words = numbers.numel() * (is_double ? 2 : 1);
  require(payload_packets(words) <= segment.inbox.capacity, op, "numbers", "takes ", payload_packets(words),
          " packets; at most ", segment.inbox.capacity, " expected, the segment's capacity");
  return {static_cast<const uint32_t*>(numbers.data_ptr()), words};
}

Tag tag_for(const Tensor& numbers, const Payload& payload, int64_t layer, int64_t step, int64_t kind) {
  const uint32_t width = numbers.scalar_type() == ScalarType::Double ? uint32_t(kDouble) : 0u;
  return {uint32_t(layer), uint32_t(step), uint32_t(payload.count), uint32_t(kind) | width};
}

// Spins, then yields, then sleeps; false when the slice is over.
class Patience {
 public:
  Patience(double seconds, int64_t ranks)
      : begin_(Clock::now()), slice_(seconds), spin_(ranks <= cores() ? kSpin : 0) {}

  // `beside_peer` says whether this thread's core is that of a peer it waits for; asked when it matters.
  template <class Ask>
  bool wait(const Ask& beside_peer) {
    if (++rounds_ % 64 == 0 || phase_ != Phase::spin) {
      const double waited = std::chrono::duration<double>(Clock::now() - begin_).count();
      if (waited >= slice_) return false;
      phase_ = waited < spin_ ? Phase::spin : waited < kYield ? Phase::yield : Phase::sleep;
      if (!moved_ && spin_ > 0 && phase_ != Phase::spin && beside_peer()) leave_core(), moved_ = true;
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
  static constexpr double kSpin = 5e-6, kYield = 2e-3;  // seconds since the wait began
  static constexpr std::chrono::microseconds kSleep{50};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static int64_t cores() {  // that this process may run on
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  // Forbids this thread its core for a moment, and so is put on another one at once.
  static void leave_core() {
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof(all), &all) != 0) return;
    cpu_set_t others = all;
    CPU_CLR(sched_getcpu(), &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof(others), &others) == 0)
      sched_setaffinity(0, sizeof(all), &all);
  }

  Clock::time_point begin_;
  double slice_, spin_;
  bool moved_ = false;
  int rounds_ = 0;
  Phase phase_ = Phase::spin;
};

void blame(State* state, int64_t peer, const Tag& theirs = {}) {
  state->peer = peer;
  state->peer_layer = theirs.layer;
  state->peer_step = theirs.step;
  state->peer_words = theirs.words;
  state->peer_kind = theirs.kind;
}

// Takes what has arrived of one peer's message; false while some of it is missing.
class Receiver {
 public:
  Receiver(const Packet* message, uint32_t epoch, const Payload& payload, uint32_t* row)
      : message_(message), epoch_(epoch), count_(payload.count), row_(row) {}

  bool header(Tag& theirs) const {
    const Packet first = load_packet(message_), second = load_packet(message_ + 1);
    theirs = tag_of(first, second);
    return arrived(first, epoch_) && arrived(second, epoch_);
  }

  bool take() {
    const Packet* payload = message_ + kHeaderPackets;
    const int64_t packets = payload_packets(count_);
    // The last one first: to read behind the writer would take every cache line from it before it is full.
    if (next_ == 0 && packets > 0 && !arrived(load_packet(payload + packets - 1), epoch_)) return false;
    for (; next_ < packets; ++next_) {
      const Packet packet = load_packet(payload + next_);
      if (!arrived(packet, epoch_)) return false;
      row_[2 * next_] = packet.word0;
      if (2 * next_ + 1 < count_) row_[2 * next_ + 1] = packet.word1;
    }
    return true;
  }

 private:
  const Packet* message_;
  uint32_t epoch_;
  int64_t count_, next_ = 0;
  uint32_t* row_;
};

// In rank order and in double, a block of columns at a time: such loops the compiler vectorises.
template <class A>
void sum_rows(const Tensor& rows, const Tensor& total) {
  constexpr int64_t kBlock = 256;
  const A* from = static_cast<const A*>(rows.data_ptr());
  A* to = static_cast<A*>(total.data_ptr());
  const int64_t n = total.numel(), ranks = rows.size(0);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t columns = std::min(kBlock, n - begin);
    double sums[kBlock] = {};
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = 0; i < columns; ++i) sums[i] += double(from[rank * n + begin + i]);
    for (int64_t i = 0; i < columns; ++i) to[begin + i] = A(sums[i]);
  }
}

}  // namespace

int64_t peer_segment_bytes(int64_t world, int64_t capacity) {
  check_room("peer_segment_bytes", "world", world, capacity);
  return world * (int64_t(sizeof(Status)) + Inbox{world, capacity}.packets() * int64_t(sizeof(Packet)));
}

void peer_push(Tensor segment_tensor, Tensor state_tensor, Tensor numbers, int64_t layer, int64_t step,
               int64_t kind) {
  const Segment segment("peer_push", segment_tensor, state_tensor);
  State* state = segment.state;
  const Payload payload = payload_of("peer_push", numbers, segment);
  const Tag tag = tag_for(numbers, payload, layer, step, kind);
  state->epoch = next_epoch(uint32_t(state->epoch));
  __atomic_store_n(&segment.status[state->rank].core, uint64_t(sched_getcpu()) + 1, __ATOMIC_RELAXED);
  const uint32_t epoch = uint32_t(state->epoch);
  for (int64_t turn = 1; turn < state->world; ++turn) {  // begin behind oneself: not all at one inbox
    Packet* message = segment.message((state->rank + turn) % state->world, state->rank);
    for (int64_t i = 0; i < kHeaderPackets; ++i) store_packet(message + i, header_packet(tag, i, epoch));
    for (int64_t i = 0; i < payload_packets(payload.count); ++i)
      store_packet(message + kHeaderPackets + i, payload_packet(payload.words, payload.count, i, epoch));
  }
}

int64_t peer_poll(Tensor segment_tensor, Tensor state_tensor, Tensor numbers, Tensor rows,
                  std::optional<Tensor> total, int64_t layer, int64_t step, int64_t kind, double seconds) {
  const Segment segment("peer_poll", segment_tensor, state_tensor);
  State* state = segment.state;
  const Payload payload = payload_of("peer_poll", numbers, segment);
  const Tag mine = tag_for(numbers, payload, layer, step, kind);
  require(rows.scalar_type() == numbers.scalar_type() && rows.dim() == 2 && rows.size(0) == state->world &&
              rows.size(1) == numbers.numel() && rows.is_contiguous(),
          "peer_poll", "rows", "is ", toString(rows.scalar_type()), " ", shape_of(rows),
          "; one contiguous row per rank like numbers expected");
  check_memory("peer_poll", "rows", rows);
  require(!total || (total->scalar_type() == numbers.scalar_type() && total->dim() == 1 &&
                     total->numel() == numbers.numel() && total->is_contiguous()),
          "peer_poll", "total", "is not like numbers");
  if (total) check_memory("peer_poll", "total", *total);

  uint32_t* words = static_cast<uint32_t*>(rows.data_ptr());
  std::memcpy(words + state->rank * payload.count, payload.words, payload.count * sizeof(uint32_t));
  struct Waiting {
    int64_t peer;
    Receiver receiver;
    bool checked = false;
  };
  std::vector<Waiting> waiting;
  for (int64_t peer = 0; peer < state->world; ++peer)
    if (peer != state->rank)
      waiting.push_back({peer, Receiver(segment.message(state->rank, peer), uint32_t(state->epoch), payload,
                                        words + peer * payload.count)});
  Patience patience(seconds, state->world);
  while (true) {
    for (Waiting& from : waiting) {
      Tag theirs;
      if (!from.checked && from.receiver.header(theirs)) {
        from.checked = true;
        if (!(theirs == mine)) return blame(state, from.peer, theirs), kMismatch;
      }
    }
    std::erase_if(waiting, [](Waiting& from) { return from.checked && from.receiver.take(); });
    const int64_t quitter = segment.gave_up_peer(waiting.empty());
    if (quitter >= 0) return blame(state, quitter), kGaveUp;
    if (waiting.empty()) break;
    const auto beside_peer = [&] {
      return std::any_of(waiting.begin(), waiting.end(),
                         [&](const Waiting& from) { return segment.is_here(from.peer); });
    };
    if (!patience.wait(beside_peer)) {
      std::fill_n(segment.missing, state->world, 0);
      for (const Waiting& from : waiting) segment.missing[from.peer] = 1;
      return kPending;
    }
  }
  // The next push may only be seen after these loads: the peers take it as leave to use this slot again.
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
  if (total && total->scalar_type() == ScalarType::Double) sum_rows<double>(rows, *total);
  if (total && total->scalar_type() == ScalarType::Float) sum_rows<float>(rows, *total);
  return kDone;
}

int64_t peer_exchange(Tensor segment, Tensor state, Tensor numbers, Tensor rows, std::optional<Tensor> total,
                      int64_t layer, int64_t step, int64_t kind, double seconds) {
  peer_push(segment, state, numbers, layer, step, kind);
  return peer_poll(segment, state, numbers, rows, total, layer, step, kind, seconds);
}

void peer_give_up(Tensor segment_tensor, Tensor state_tensor) {
  const Segment segment("peer_give_up", segment_tensor, state_tensor);
  State* state = segment.state;
  ++state->generation;
  __atomic_store_n(&segment.status[state->rank].gave_up,
                   generation_at(uint64_t(state->generation), uint32_t(state->epoch)), __ATOMIC_RELEASE);
}

int64_t peer_rejoin(Tensor segment_tensor, Tensor state_tensor, double seconds) {
  const Segment segment("peer_rejoin", segment_tensor, state_tensor);
  State* state = segment.state;
  const uint64_t generation = uint64_t(state->generation);
  uint32_t epoch = uint32_t(state->epoch);
  Status& own = segment.status[state->rank];
  __atomic_store_n(&own.step, uint64_t(state->step), __ATOMIC_RELAXED);
  // Released after every store of an abandoned push, so none of them can land in a later exchange.
  __atomic_store_n(&own.rejoined, generation_at(generation, epoch), __ATOMIC_RELEASE);
  Patience patience(seconds, state->world);
  const auto away = [&](int64_t peer) {
    return load(segment.status[peer].rejoined, __ATOMIC_ACQUIRE) >> 32 < generation;
  };
  while (true) {
    int64_t absent = 0;
    for (int64_t peer = 0; peer < state->world; ++peer) absent += segment.missing[peer] = away(peer);
    if (absent == 0) break;
    if (!patience.wait([] { return false; })) return kPending;
  }
  for (int64_t peer = 0; peer < state->world; ++peer) {
    epoch = later_epoch(epoch, uint32_t(load(segment.status[peer].rejoined)));
    state->step = std::max(state->step, int64_t(load(segment.status[peer].step)));
  }
  state->epoch = epoch;
  return kDone;
}

}  // namespace fastvit
