// The peer protocol: how ranks that see each other's memory exchange O(C) numbers without a collective.
// Written once for host and device; what moves the packets stands in cpu/peer.cpp and cuda/peer.cuh.
//
// Protocol  Every rank owns an inbox. In exchange `epoch` a rank *pushes* one message into each peer's inbox
//           and never waits for it; then it *polls* its own inbox, in local memory, until all peers' messages
//           are there. A message is a header of kHeaderPackets, which carries the tag, and the payload.
//           A packet is 16 bytes {word, epoch, word, epoch}: the flag travels with the data, so a packet is
//           read when its epoch is the one awaited, and there is no fence, no counter and nothing to reset.
//           Each aligned half of 8 bytes has a flag of its own: stores of 8 bytes need be atomic, not of 16.
// Slots     A message of epoch e goes into slot e % 2. Whoever pushes e has polled e - 1, so every peer had
//           pushed e - 1, so every peer had finished polling e - 2: the slot is free. With one slot a fast
//           rank would write e over e - 1, which its peer, having pushed e - 1 itself, may not have read yet.
//           This needs what both sides keep: a rank polls an exchange to its end before it pushes the next.
// Epochs    1, 2, 3, ... in memory that survives graph replay; after 2^32 - 1 comes 2, which keeps the slots
//           alternating and leaves out 0, the epoch of memory that was never written. A packet can be taken
//           for a later one only if nobody has written it for 2^32 - 2 exchanges.
// Tags      {layer, step, words, kind}: compared before the payload is read, as a rank in another layer may
//           have sent fewer words than are awaited. Each rank compares all tags with its own, so a mismatch
//           is an error on every rank.
// Faults    A rank that gives up an exchange (mismatch, timeout, interrupt) writes a Report for its host and
//           counts its generation up for its peers to see, which then give up too instead of waiting for
//           their own timeouts. At their next use the ranks rejoin: each publishes {generation, epoch}, waits
//           for the others', and goes on behind the largest epoch, so no abandoned packet fits again.
// Memory    inbox[sender][slot][kHeaderPackets + capacity] packets per rank, `capacity` packets being the
//           largest payload. A float takes half a packet, a double a whole one: fp32 moments are 16 (C + 1)
//           bytes.
// Source    The flag inside the data is that of NCCL's LL protocol (NCCL_PROTO in its documentation); buffers
//           with one writer and one reader: Lamport, "Proving the Correctness of Multiprocess Programs"
//           (1977). tests/test_peer_model.py enumerates every interleaving of a model of this file.
#pragma once

#include <cstdint>

#include "macros.h"

namespace fastvit::peer {

struct alignas(16) Packet {
  uint32_t word0, epoch0, word1, epoch1;
};

constexpr int kSlots = 2;
constexpr int64_t kHeaderPackets = 2;  // {layer, step}, {words, kind}

// The first epoch that a fresh, zeroed inbox takes is next_epoch(0).
FASTVIT_INLINE uint32_t next_epoch(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2u : epoch + 1u;
}

FASTVIT_INLINE uint32_t slot_of(uint32_t epoch) {
  return epoch % kSlots;
}

// What is in a message, besides its numbers.
enum Kind : uint32_t {
  kMoments = 0,  // forward
  kSums = 1,     // backward
  kDouble = 2,   // or-ed in: a number is a double, two words, instead of a float
};

struct Tag {
  uint32_t layer;  // order in which the group first saw the layer
  uint32_t step;   // the group's count of forward exchanges; a backward carries that of its forward
  uint32_t words;  // of payload
  uint32_t kind;
};

FASTVIT_INLINE bool operator==(const Tag& a, const Tag& b) {
  return a.layer == b.layer && a.step == b.step && a.words == b.words && a.kind == b.kind;
}

// A launch that was captured into a graph has no step of its own, as it may be replayed any number of times:
// its 0 goes with every step.
FASTVIT_INLINE bool same_exchange(const Tag& a, const Tag& b) {
  return a == Tag{b.layer, a.step, b.words, b.kind} && (a.step == b.step || a.step == 0 || b.step == 0);
}

FASTVIT_INLINE int64_t payload_packets(int64_t words) {
  return (words + 1) / 2;
}

// Words of a message, header included, by packet; the last word of an odd payload is padded with 0.
FASTVIT_INLINE Packet header_packet(const Tag& tag, int64_t i, uint32_t epoch) {
  return i == 0 ? Packet{tag.layer, epoch, tag.step, epoch} : Packet{tag.words, epoch, tag.kind, epoch};
}

FASTVIT_INLINE Packet payload_packet(const uint32_t* words, int64_t count, int64_t i, uint32_t epoch) {
  return Packet{words[2 * i], epoch, 2 * i + 1 < count ? words[2 * i + 1] : 0u, epoch};
}

FASTVIT_INLINE bool arrived(const Packet& packet, uint32_t epoch) {
  return packet.epoch0 == epoch && packet.epoch1 == epoch;
}

FASTVIT_INLINE Tag tag_of(const Packet& first, const Packet& second) {
  return Tag{first.word0, first.word1, second.word0, second.word1};
}

// Where things are in an inbox; all in packets.
struct Inbox {
  int64_t world, capacity;

  FASTVIT_INLINE int64_t message_packets() const { return kHeaderPackets + capacity; }
  FASTVIT_INLINE int64_t packets() const { return world * kSlots * message_packets(); }
  FASTVIT_INLINE int64_t message(int64_t sender, uint32_t epoch) const {
    return (sender * kSlots + slot_of(epoch)) * message_packets();
  }
};

// Why an exchange ended.
enum Fault : uint32_t {
  kPending = 0,   // not ended: a slice of waiting is over, and nothing is wrong
  kDone = 1,      // every message was there
  kMismatch = 2,  // a peer's tag is another
  kGaveUp = 3,    // a peer has given up this or an earlier exchange
  kTimeout = 4,   // a peer's message was not there in time
};

// What the host needs to say what happened. `peer` is the first that failed; `theirs` is set for kMismatch.
struct Report {
  uint32_t fault, rank, peer, epoch;
  Tag mine, theirs;
};

// One line of shared memory per rank, written by it alone. Words are 8 bytes, stored and loaded whole.
struct alignas(64) Status {
  uint64_t gave_up;  // {generation, epoch}: counts the exchanges that this rank gave up, and the last of them
  uint64_t rejoined;  // {generation, epoch}: the last generation at which it was ready again, and its epoch
  uint64_t step;      // its count of forward exchanges when it rejoined
  uint64_t process;   // its process id, when it has mapped the segment
  uint64_t core;      // that it last sent from, plus 1
};

FASTVIT_INLINE uint64_t generation_at(uint64_t generation, uint32_t epoch) {
  return generation << 32 | epoch;
}

// Epochs wrap, so the later of two is the one that is less than half a turn ahead.
FASTVIT_INLINE uint32_t later_epoch(uint32_t a, uint32_t b) {
  return int32_t(a - b) > 0 ? a : b;
}

}  // namespace fastvit::peer
