// The peer protocol: how the ranks (processes) of a process group that see each other's memory exchange a
// layer's statistics, without a collective of torch.distributed. Host and device share this file;
// cpu_exchange.cpp, and message_sender.cuh and exchange.cuh of csrc/cuda, send and receive.
//
// Every rank has an arena: memory to which its peers, the other ranks, write. Most of the arena is the
// inbox, with slots for the messages of each sender. In an exchange a rank sends one message to the inbox
// of every peer (a GPU also to its own inbox) and does not wait. Then the rank reads its own inbox until
// all messages have arrived, and merges them in the order of ranks. A message is a header with a tag, by
// which ranks see that they are in the same exchange, and a payload of numbers. A rank abandons an exchange
// (gives it up) after a fault, on a CPU also after any error in Python, and tells its peers.
//
// Source: NCCL's LL protocol also sends flags with its data (NCCL_PROTO in its documentation). The slots of
// a sender are a buffer with one writer and one reader, see Lamport, "Proving the Correctness of
// Multiprocess Programs" (1977).
#pragma once

#include <cstdint>
#include <cstring>

#include "../host_device.h"

namespace fastvit::peer {

constexpr int kMaxRanks = 64;  // a mask of ranks is a uint64_t

// The epoch is the number of an exchange. It begins at 1. The last one is kept in the arena, so that each
// replay of a CUDA graph gets a new epoch. 2 follows 2^32 - 1, because even and odd epochs must alternate
// (they choose between two slots, see kSlotsPerSender), and because 0 is the epoch of memory never written.
FASTVIT_HOST_DEVICE uint32_t next_epoch(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2u : epoch + 1u;
}

// A packet is two 32-bit words of a message, each with the epoch of the message's exchange. A packet has
// arrived if both epochs are the current one. So nobody counts packets or clears slots for the next exchange,
// and between GPUs no fence is needed. Each half of 8 bytes is stored and loaded atomically. An old packet
// would be taken for a new one only if it stayed in its slot for 2^32 - 2 exchanges.
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

// Ranks compare tags before they use a payload. A peer that is at another layer may send a shorter payload,
// and the reader would wait for the rest in vain, or read old data.
struct Tag {
  uint32_t layer;          // the layer's index, in the order in which the process group first saw its layers
  uint32_t forward_index;  // the number of a forward exchange in the group; its backward has the same
  uint32_t words;          // 32-bit words of the payload
  uint32_t kind;           // a NumberKind, with or without kFloat64
};

FASTVIT_HOST_DEVICE bool operator==(const Tag& a, const Tag& b) {
  return a.layer == b.layer && a.forward_index == b.forward_index && a.words == b.words && a.kind == b.kind;
}

FASTVIT_HOST_DEVICE NumberKind number_kind_of(const Tag& tag) {
  return NumberKind(tag.kind & kSums);
}

// Whether two ranks with GPUs are in the same exchange: their tags are equal, or differ only in forward_index
// and one has forward_index 0, because it replays a captured CUDA graph. Each rank compares its tag with
// those of all ranks: if two tags differ, its own differs from one of them, so every rank sees a mismatch.
// There is one exception: the tag of a replaying rank may match those of two peers whose forward_index
// differs. That rank finds, in the next exchange at the latest, that the peers have abandoned this one.
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

// A pair is two numbers of a payload: of one channel, or the count. Between GPUs the payload is pairs in
// packets, so threads send and receive channels independently. Pair i of a message begins at packet
// kHeaderPackets + i * kPacketsPerPair. Between CPUs the payload is the numbers alone; the header is written
// after the payload, behind a fence.
template <class A>
constexpr int kPacketsPerPair = sizeof(A) / 4;  // two numbers of type A, float or double; 8 bytes in a packet

// Pair c < C is mean and M2 of channel c, or its two sums. Moments of C channels have one more pair, C: the
// count, which is stored as two numbers (pack_count in moments.h). So between GPUs a payload of float32
// moments has 16 (C + 1) bytes. A: float or double.
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
  // Messages are missing. On a CPU the op returns after a time, and exchange_wait goes on waiting.
  // FaultReport::fault has this value as long as there is no fault, also if all messages have arrived.
  kPending = 0,
  kDone = 1,           // all messages have arrived; never in a FaultReport that the host reads
  kMismatch = 2,       // a fault: a peer's tag differs
  kPeerAbandoned = 3,  // a fault: a peer has abandoned this exchange, or any while messages are missing
  kTimeout = 4,        // a fault, on a GPU: a peer's message did not arrive in time
};

// An op writes the report after a fault, and the host reads it. After a fault the result of the exchange is
// NaN; between GPUs so is the result of every later exchange.
struct FaultReport {
  uint32_t fault;         // an ExchangeState
  uint32_t rank;          // the rank that reports
  uint32_t peer;          // the rank that caused the fault; one of them if there are several
  uint32_t epoch;         // the number of the exchange
  Tag own_tag, peer_tag;  // peer_tag is set for kMismatch
  // Written on a CPU, also without a fault: a bit for each rank whose message is missing.
  uint64_t missing_ranks_mask;
};

// The memory of one rank; its inbox follows this struct. An arena begins as zeros.
struct alignas(128) Arena {
  uint32_t epoch;   // of the last exchange of which the rank received all messages
  uint32_t failed;  // not 0: the rank has abandoned an exchange; between GPUs every later one fails
  // Rank r writes element r: the epoch of the exchange that rank r abandoned; it is 0 before. The owner of
  // the arena reads the element while it waits; if it is set, the owner abandons its exchange at once instead
  // of waiting for the timeout.
  uint64_t abandoned_epoch_of[kMaxRanks];
};

// Message e, the message of epoch e, goes to slot e % 2 of its sender, where message e - 2 was. Rank a sends
// message e only after it has message e - 1 of each peer b, and b sent message e - 1 only after it had read
// a's message e - 2. So nobody reads message e - 2 any more. With a single slot, a fast rank could overwrite
// message e - 1 before a slow peer has read it.
constexpr int kSlotsPerSender = 2;

// The places of the slots in an inbox. Sizes and offsets are in packets.
struct InboxLayout {
  int64_t world;     // the number of ranks
  int64_t capacity;  // of a slot: packets of the largest payload

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
  // On a GPU the time until kTimeout. On a CPU the time until an op returns to Python, which may call
  // exchange_wait to wait again.
  uint64_t timeout_ns = 0;
  Tag tag{};
  FaultReport* report = nullptr;  // in host memory, mapped for GPUs
  Arena* arenas[kMaxRanks] = {};  // of all ranks

  FASTVIT_HOST_DEVICE Arena& own_arena() const { return *arenas[rank]; }
  // Returns the beginning of the message from `sender` in the inbox of `receiver`. Only between GPUs: the
  // slots of CPUs are smaller (cpu_exchange.cpp).
  FASTVIT_HOST_DEVICE Packet* inbox_slot(int receiver, int sender, uint32_t epoch) const {
    return reinterpret_cast<Packet*>(arenas[receiver] + 1) +
           InboxLayout{world, capacity}.slot_offset(sender, epoch);
  }
};

}  // namespace fastvit::peer
