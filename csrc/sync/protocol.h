// The peer protocol: how ranks that see each other's memory exchange O(C) numbers without a collective.
// For host and device; cpu_exchange.cpp and csrc/cuda/exchange.cuh move the packets.
//
// Protocol  Every rank owns an arena: a few words, and an inbox. In exchange `epoch` a rank *pushes* one
//           message into the inbox of every other rank, on a GPU also into its own, without waiting. Then it
//           *polls* its own inbox, in its own memory, until all messages are complete, and merges them in
//           rank order. A message is a header of kHeaderPackets, with the tag, and the payload. A packet is
//           16 bytes {word, epoch, word, epoch}: the flag travels with the data. A packet is valid when its
//           epoch is the current one, so there is no counter and no reset. Each aligned half of 8 bytes has
//           its own flag, so only stores of 8 bytes must be atomic, not of 16.
// Payload   Between GPUs packets too, so there is no fence. They hold pairs: the two numbers of channel c,
// (mean, M2) or
//           the two sums, are pair c, and the count of moments is the last pair. So threads can send and read
//           channels independently. A pair of floats is one packet, of doubles two: fp32 moments are
//           16 (C + 1) bytes. Between CPUs the numbers alone; the header is written after them, behind a
//           fence.
// Slots     A message of epoch e goes into slot e % 2. A rank pushes e after it has polled e - 1. Then every
//           peer has pushed e - 1, and so has polled e - 2: the slot is free. With one slot a fast rank could
//           overwrite e - 1 with e before its peer has read it. Every rank must poll an exchange to its end
//           before it pushes the next.
// Epochs    1, 2, 3, ... in memory that survives graph replay. 2 follows 2^32 - 1, so that slots alternate
//           and 0, the epoch of memory that was never written, is not used. A stale packet can be taken for a
//           valid one only if it was not overwritten for 2^32 - 2 exchanges.
// Tags      {layer, forward_index, words, kind}: compared before the payload is read, since a rank in another layer
//           may have sent fewer words. Each rank compares all tags with its own, so a mismatch is an error on
//           every rank; only a rank that replays a graph, whose step is 0 and matches any, may see it in the
//           next exchange, when the others have given up.
// Faults    A rank that gives up an exchange (mismatch, timeout, interrupt) writes a FaultReport for its
//           host, and the epoch into its peers' arenas. The peers then give up too, before their own
//           timeouts. Its result is NaN, and so is that of every later exchange: no rank goes on.
// Source    The flag inside the data is that of NCCL's LL protocol (NCCL_PROTO in its documentation); buffers
//           with one writer and one reader: Lamport, "Proving the Correctness of Multiprocess Programs"
//           (1977).
#pragma once

#include <cstdint>
#include <cstring>

#include "../host_device.h"

namespace fastvit::peer {

struct alignas(16) Packet {
  uint32_t word0, epoch0, word1, epoch1;
};

constexpr int kMaxRanks = 64;
constexpr int kSlots = 2;
constexpr int64_t kHeaderPackets = 2;  // {layer, forward_index}, {words, kind}

// The first epoch of a new, zeroed inbox is next_epoch(0).
FASTVIT_HOST_DEVICE uint32_t next_epoch(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2u : epoch + 1u;
}

enum NumberKind : uint32_t {
  kMoments = 0,  // of a forward
  kSums = 1,     // of a backward
};
constexpr uint32_t kFloat64 = 2;  // a flag beside the kind: numbers are doubles of two words, not floats

struct Tag {
  uint32_t layer;          // order in which the group first saw the layer
  uint32_t forward_index;  // the group's count of forward exchanges; a backward carries that of its forward
  uint32_t words;          // of payload
  uint32_t kind;
};

FASTVIT_HOST_DEVICE bool operator==(const Tag& a, const Tag& b) {
  return a.layer == b.layer && a.forward_index == b.forward_index && a.words == b.words && a.kind == b.kind;
}

// Step 0 is a wildcard: captured graphs replay at any step.
FASTVIT_HOST_DEVICE bool tags_match(const Tag& a, const Tag& b) {
  return a == Tag{b.layer, a.forward_index, b.words, b.kind} &&
         (a.forward_index == b.forward_index || a.forward_index == 0 || b.forward_index == 0);
}

FASTVIT_HOST_DEVICE Packet header_packet(const Tag& tag, int64_t i, uint32_t epoch) {
  return i == 0 ? Packet{tag.layer, epoch, tag.forward_index, epoch}
                : Packet{tag.words, epoch, tag.kind, epoch};
}

FASTVIT_HOST_DEVICE bool arrived(const Packet& packet, uint32_t epoch) {
  return packet.epoch0 == epoch && packet.epoch1 == epoch;
}

FASTVIT_HOST_DEVICE Tag tag_from_header(const Packet& first, const Packet& second) {
  return Tag{first.word0, first.word1, second.word0, second.word1};
}

// Pair i of a message takes kPairPackets packets from kHeaderPackets + i * kPairPackets on.
template <class A>
constexpr int kPairPackets = sizeof(A) / 4;

template <class A>
struct Pair {
  A first, second;

  FASTVIT_HOST_DEVICE void pack(uint32_t epoch, Packet (&packets)[kPairPackets<A>]) const {
    uint32_t words[2 * kPairPackets<A>];
    memcpy(words, this, sizeof(words));
    for (int k = 0; k < kPairPackets<A>; ++k)
      packets[k] = Packet{words[2 * k], epoch, words[2 * k + 1], epoch};
  }
  // False if a part has not arrived.
  FASTVIT_HOST_DEVICE bool unpack(uint32_t epoch, const Packet (&packets)[kPairPackets<A>]) {
    uint32_t words[2 * kPairPackets<A>];
    bool all = true;
    for (int k = 0; k < kPairPackets<A>; ++k) {
      words[2 * k] = packets[k].word0;
      words[2 * k + 1] = packets[k].word1;
      all &= arrived(packets[k], epoch);
    }
    memcpy(this, words, sizeof(words));
    return all;
  }
};

// The state of an exchange.
enum ExchangeState : uint32_t {
  kPending = 0,        // not ended; on a CPU after a slice of waiting
  kDone = 1,           // all messages arrived
  kMismatch = 2,       // a peer's tag differs
  kPeerAbandoned = 3,  // a peer has given up this or an earlier exchange
  kTimeout = 4,        // a peer's message did not arrive in time
};

// A fault, for the host. `peer` is the first rank that failed; `peer_tag` is set for kMismatch.
struct FaultReport {
  uint32_t fault, rank, peer, epoch;
  Tag own_tag, peer_tag;
  uint64_t missing_ranks_mask;  // on a CPU: a bit per rank whose message has not arrived
};

// The memory of a group that a rank owns; its inbox follows. All of it is zero at first.
struct alignas(128) Arena {
  uint32_t epoch;   // the last exchange that the rank polled to its end
  uint32_t failed;  // not 0: an exchange was given up, and all later ones fail
  // By rank, stored atomically by that rank: the epoch of the exchange that it gave up; 0 for none.
  uint64_t abandoned_epoch_of[kMaxRanks];
};

// Offsets in an inbox, in packets. `capacity` packets are the largest payload.
struct Inbox {
  int64_t world, capacity;

  FASTVIT_HOST_DEVICE int64_t message_packets() const { return kHeaderPackets + capacity; }
  FASTVIT_HOST_DEVICE int64_t packets() const { return world * kSlots * message_packets(); }
  FASTVIT_HOST_DEVICE int64_t message(int64_t sender, uint32_t epoch) const {
    return (sender * kSlots + epoch % kSlots) * message_packets();
  }
};

// The parameters of one exchange: ranks, arenas and the tag of its messages.
struct Exchange {
  int world = 0;  // 0: no exchange
  int rank = 0;
  int64_t capacity = 0;
  uint64_t timeout_ns = 0;  // timeout of a GPU, slice of waiting of a CPU
  Tag tag{};
  FaultReport* report = nullptr;  // in host memory, mapped for GPUs
  Arena* arenas[kMaxRanks] = {};

  FASTVIT_HOST_DEVICE Arena& own_arena() const { return *arenas[rank]; }
  FASTVIT_HOST_DEVICE Packet* message(int receiver, int sender, uint32_t epoch) const {
    return reinterpret_cast<Packet*>(arenas[receiver] + 1) + Inbox{world, capacity}.message(sender, epoch);
  }
};

}  // namespace fastvit::peer
