// The peer protocol: how ranks that see each other's memory exchange a layer's statistics, without a
// collective. Host and device share this file; cpu_exchange.cpp and csrc/cuda/exchange.cuh send and receive.
//
// Every rank has an arena: memory to which its peers, the other ranks, write. Most of the arena is the
// inbox, with slots for the messages of each sender. In an exchange a rank sends one message to the inbox
// of every peer (a GPU also to its own inbox) and does not wait. Then the rank reads its own inbox until
// all messages have arrived, and merges them in the order of ranks. A message is a header with a tag, and a
// payload of numbers.
//
// Source: NCCL's LL protocol also sends flags with its data (NCCL_PROTO in its documentation); for buffers
// with one writer and one reader, Lamport, "Proving the Correctness of Multiprocess Programs" (1977).
#pragma once

#include <cstdint>
#include <cstring>

#include "../host_device.h"

namespace fastvit::peer {

constexpr int kMaxRanks = 64;

// The epoch is the number of an exchange. It begins at 1 and is kept in memory, so that each replay of a
// CUDA graph gets a new epoch. 2 follows 2^32 - 1, because even and odd epochs must alternate, and because
// 0 is the epoch of memory that was never written.
FASTVIT_HOST_DEVICE uint32_t next_epoch(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2u : epoch + 1u;
}

// Two words of a message, each with its exchange's epoch. A packet is valid if both epochs are the current
// one, so there is no counter, no reset and, between GPUs, no fence. Each half of 8 bytes is stored and
// loaded atomically. An old packet is taken for a new one only if it stays in its slot for 2^32 - 2
// exchanges.
struct alignas(16) Packet {
  uint32_t word0, epoch0, word1, epoch1;
};

FASTVIT_HOST_DEVICE bool has_arrived(const Packet& packet, uint32_t epoch) {
  return packet.epoch0 == epoch && packet.epoch1 == epoch;
}

enum NumberKind : uint32_t {
  kMoments = 0,  // mean and M2 of every channel, and the count of values: exchanged in a forward
  kSums = 1,     // two sums of every channel: exchanged in a backward
};
constexpr uint32_t kFloat64 = 2;  // a flag in Tag::kind: the numbers are doubles of two words, not floats

// What ranks compare before they read a payload, because a rank in another layer may have sent fewer words.
struct Tag {
  uint32_t layer;          // the order in which the group first saw the layer
  uint32_t forward_index;  // the group's count of forward exchanges; a backward has that of its forward
  uint32_t words;          // 32-bit words of the payload
  uint32_t kind;           // a NumberKind, with or without kFloat64
};

FASTVIT_HOST_DEVICE bool operator==(const Tag& a, const Tag& b) {
  return a.layer == b.layer && a.forward_index == b.forward_index && a.words == b.words && a.kind == b.kind;
}

// Whether two ranks are in the same exchange. A rank that replays a captured CUDA graph has forward_index
// 0, which matches every other one. Each rank compares the tags of all ranks with its own tag, so every
// rank sees a mismatch. Only the rank that replays may see it in its next exchange, when its peers have
// abandoned theirs.
FASTVIT_HOST_DEVICE bool tags_match(const Tag& a, const Tag& b) {
  return a == Tag{b.layer, a.forward_index, b.words, b.kind} &&
         (a.forward_index == b.forward_index || a.forward_index == 0 || b.forward_index == 0);
}

// A header has two packets: {layer, forward_index} and {words, kind}.
constexpr int64_t kHeaderPackets = 2;

FASTVIT_HOST_DEVICE Packet header_packet(const Tag& tag, int64_t i, uint32_t epoch) {
  return i == 0 ? Packet{tag.layer, epoch, tag.forward_index, epoch}
                : Packet{tag.words, epoch, tag.kind, epoch};
}

FASTVIT_HOST_DEVICE Tag tag_from_header(const Packet& packet0, const Packet& packet1) {
  return Tag{packet0.word0, packet0.word1, packet1.word0, packet1.word1};
}

// Between GPUs the payload is packets too. Pair i of the payload takes kPacketsPerPair packets from packet
// kHeaderPackets + i * kPacketsPerPair of the message on, so threads send and receive channels independently.
// Between CPUs the payload is the numbers alone; the header is written behind a fence, after the payload.
template <class A>
constexpr int kPacketsPerPair = sizeof(A) / 4;  // A: float, or double

// Pair c < C has the two numbers of channel c: mean and M2, or the two sums. Pair C of moments has the
// count, which takes two numbers (moments.h). So float32 moments take 16 (C + 1) bytes.
template <class A>
struct Pair {
  A first, second;

  FASTVIT_HOST_DEVICE void pack(uint32_t epoch, Packet (&packets)[kPacketsPerPair<A>]) const {
    uint32_t words[2 * kPacketsPerPair<A>];
    memcpy(words, this, sizeof(words));
    for (int k = 0; k < kPacketsPerPair<A>; ++k)
      packets[k] = Packet{words[2 * k], epoch, words[2 * k + 1], epoch};
  }
  // Returns false if one of the packets has not arrived.
  FASTVIT_HOST_DEVICE bool unpack(uint32_t epoch, const Packet (&packets)[kPacketsPerPair<A>]) {
    uint32_t words[2 * kPacketsPerPair<A>];
    bool is_complete = true;
    for (int k = 0; k < kPacketsPerPair<A>; ++k) {
      words[2 * k] = packets[k].word0;
      words[2 * k + 1] = packets[k].word1;
      is_complete &= has_arrived(packets[k], epoch);
    }
    memcpy(this, words, sizeof(words));
    return is_complete;
  }
};

enum ExchangeState : uint32_t {
  kPending = 0,        // messages are missing; a CPU rank waits again
  kDone = 1,           // all messages arrived
  kMismatch = 2,       // a fault: a peer's tag differs
  kPeerAbandoned = 3,  // a fault: a peer has abandoned this exchange or an earlier one
  kTimeout = 4,        // a fault: a peer's message did not arrive in time
};

// What the host reads of a failed exchange. After a fault the results of this exchange and of every later
// one are NaN.
struct FaultReport {
  uint32_t fault;  // an ExchangeState
  uint32_t rank;   // the rank that reports
  uint32_t peer;   // the first rank that failed
  uint32_t epoch;
  Tag own_tag, peer_tag;        // peer_tag is set for kMismatch
  uint64_t missing_ranks_mask;  // used on a CPU: a bit for each rank whose message has not arrived
};

// The memory of one rank; its inbox follows this struct. An arena begins as zeros.
struct alignas(128) Arena {
  uint32_t epoch;   // the last exchange of which the rank received all messages
  uint32_t failed;  // not 0: the rank has abandoned an exchange, and every later one fails
  // Element r is written by rank r: the epoch of the exchange that rank r abandoned, or 0. The owner of the
  // arena reads it while it waits, and abandons its exchange too, long before its own timeout.
  uint64_t abandoned_epoch_of[kMaxRanks];
};

// The message of epoch e goes to slot e % 2 of its sender, where message e - 2 was. A rank sends e after it
// has received e - 1 of every peer, and that peer had received e - 2 before it sent e - 1. So nobody reads
// message e - 2 any more. With a single slot, a fast rank could overwrite message e - 1 before a slow peer
// has read it.
constexpr int kSlotsPerSender = 2;

// Where the slots are in an inbox, in packets.
struct InboxLayout {
  int64_t world;     // the number of ranks
  int64_t capacity;  // packets of the largest payload

  FASTVIT_HOST_DEVICE int64_t packets_per_slot() const { return kHeaderPackets + capacity; }
  FASTVIT_HOST_DEVICE int64_t packet_count() const { return world * kSlotsPerSender * packets_per_slot(); }
  FASTVIT_HOST_DEVICE int64_t slot_offset(int64_t sender, uint32_t epoch) const {
    return (sender * kSlotsPerSender + epoch % kSlotsPerSender) * packets_per_slot();
  }
};

// The parameters of one exchange.
struct Exchange {
  int world = 0;         // the number of ranks
  int rank = 0;          // this rank
  int64_t capacity = 0;  // packets of the largest payload
  // On a GPU the time until kTimeout; on a CPU the time until an op returns to Python, which may wait again.
  uint64_t timeout_ns = 0;
  Tag tag{};
  FaultReport* report = nullptr;  // in host memory, mapped for GPUs
  Arena* arenas[kMaxRanks] = {};  // of all ranks

  FASTVIT_HOST_DEVICE Arena& own_arena() const { return *arenas[rank]; }
  // The first packet of a message between GPUs.
  FASTVIT_HOST_DEVICE Packet* inbox_slot(int receiver, int sender, uint32_t epoch) const {
    return reinterpret_cast<Packet*>(arenas[receiver] + 1) +
           InboxLayout{world, capacity}.slot_offset(sender, epoch);
  }
};

}  // namespace fastvit::peer
