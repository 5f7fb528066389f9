// MessageSender: sends a rank's message of an exchange from a kernel. In an exchange every rank (process) of
// a group sends its moments (mean, M2 and count) or sums of C channels to all ranks, and merges those of all.
// The message goes to this rank itself too, so that a rank reads its own message in the same way as those of
// the other ranks. exchange.cuh receives; sync/protocol.h defines the messages.
#pragma once

#include "../moments.h"
#include "../sync/protocol.h"
#include "ptx.cuh"

namespace fastvit {

using peer::Exchange;

// Reads `epoch` or `failed` of this rank's arena: the memory to which the ranks write messages; most of it is
// the inbox. The block that ends the exchange may write the word at the same time.
__device__ __forceinline__ uint32_t load_arena_word(uint32_t& word) {
  return DeviceAtomic<uint32_t>(word).load(cuda::std::memory_order_relaxed);
}

// Sends this rank's message: a header with the exchange's tag (by which ranks see that they are in the same
// exchange), and a pair of numbers for each channel. A message is packets of 16 bytes: two words of data,
// each with the epoch. After a failed exchange it sends nothing. A: float or double, the type of the numbers.
template <class A>
class MessageSender {
  const Exchange& exchange;
  // The number of this exchange, stored in every packet; 0: an earlier exchange has failed.
  uint32_t epoch = 0;

  // Calls store(slot) for every rank. `slot` is the place of the message in the rank's inbox.
  template <class Store>
  __device__ __forceinline__ void for_each_receiver(const Store& store) const {
    // The first receiver is this rank, so that ranks do not all write to one inbox.
    for (int turn = 0; turn < exchange.world; ++turn) {
      int receiver = exchange.rank + turn;
      if (receiver >= exchange.world) receiver -= exchange.world;
      store(exchange.inbox_slot(receiver, exchange.rank, epoch));
    }
  }

 public:
  __device__ __forceinline__ explicit MessageSender(const Exchange& exchange) : exchange(exchange) {
    if (!load_arena_word(exchange.own_arena().failed))
      epoch = peer::next_epoch(load_arena_word(exchange.own_arena().epoch));
  }
  // Sends pair i, the two numbers of channel i: mean and M2, or the two sums.
  __device__ __forceinline__ void send_pair(int64_t i, A first, A second) const {
    if (epoch == 0) return;
    peer::Packet packets[peer::kPacketsPerPair<A>];
    peer::Pair<A>{first, second}.pack(epoch, packets);
    for_each_receiver([&](peer::Packet* slot) {
#pragma unroll
      for (int k = 0; k < peer::kPacketsPerPair<A>; ++k)
        store_packet(slot + peer::kHeaderPackets + i * peer::kPacketsPerPair<A> + k, packets[k]);
    });
  }
  // For sums: sends the header. All threads of the grid may call; one sends.
  __device__ __forceinline__ void send_header() const {
    if (epoch == 0 || blockIdx.x != 0 || threadIdx.x != 0) return;
    for_each_receiver([&](peer::Packet* slot) {
      for (int i = 0; i < peer::kHeaderPackets; ++i)
        store_packet(slot + i, header_packet(exchange.tag, i, epoch));
    });
  }
  // For moments: sends the header and, as pair C, the count of the values that this rank has of each channel.
  __device__ __forceinline__ void send_header(int64_t C, double count) const {
    send_header();
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    A packed_count[2];
    pack_count(packed_count, count);
    send_pair(C, packed_count[0], packed_count[1]);
  }
};

}  // namespace fastvit
