// The peer protocol of ../peer.h between GPUs: what the kernels of an exchange push to their peers' memory,
// and poll in their own.
//
// Push     never waits. Whoever has a channel's two numbers stores them to every rank, its own included, so
//          that a poll reads all ranks alike; one thread of the launch sends the header.
// Poll     waits for the headers, then each thread for the numbers it needs. A wait has an end: a tag that
//          differs, a rank that gave up, or the timeout, by the GPU's own clock.
// Fault    `ended` decides once for all blocks whether an exchange is done or failed, so the running
//          statistics are written for all channels or for none. Who decides that it failed writes a report to
//          host memory and tells the peers; what was awaited is NaN then, and the kernel goes on. Until the
//          ranks rejoin, exchanges fail at once.
// Order    Between ranks only packets, whose flags travel with the data; between the kernels of a rank its
//          stream.
#pragma once

#include <cmath>
#include <cstring>

#include "../exchange.h"
#include "report.cuh"

namespace fastvit {

using peer::Exchange;
using peer::Fault;

// Pair i of a message takes kPairPackets packets from i * kPairPackets on, behind the header.
template <class A>
constexpr int kPairPackets = sizeof(A) / 4;

class Push {
  const Exchange& exchange;
  uint32_t epoch = 0;

  template <class At>
  __device__ __forceinline__ void to_all(const At& store) const {
    for (int turn = 0; turn < exchange.world; ++turn) {  // begin at oneself: not all at one inbox
      int peer = exchange.rank + turn;
      if (peer >= exchange.world) peer -= exchange.world;
      store(exchange.message(peer, exchange.rank, epoch));
    }
  }

 public:
  // An exchange of no ranks, or one after a fault, sends nothing.
  __device__ __forceinline__ explicit Push(const Exchange& exchange) : exchange(exchange) {
    if (exchange.world == 0 || exchange.own().abandoned) return;
    epoch = peer::next_epoch(exchange.own().polled);
  }
  __device__ __forceinline__ explicit operator bool() const { return epoch != 0; }

  template <class A>
  __device__ __forceinline__ void pair(int64_t i, A first, A second) const {
    const A numbers[2] = {first, second};
    uint32_t words[2 * kPairPackets<A>];
    memcpy(words, numbers, sizeof(words));
    to_all([&](peer::Packet* message) {
#pragma unroll
      for (int k = 0; k < kPairPackets<A>; ++k)
        store_packet(message + peer::kHeaderPackets + i * kPairPackets<A> + k,
                     {words[2 * k], epoch, words[2 * k + 1], epoch});
    });
  }
  __device__ __forceinline__ void header() const {  // by one thread of the launch
    to_all([&](peer::Packet* message) {
      for (int i = 0; i < peer::kHeaderPackets; ++i)
        store_packet(message + i, header_packet(exchange.tag, i, epoch));
    });
    exchange.own().pushed = epoch;
  }
};

class Poll {
  const Exchange& exchange;
  uint64_t begin = 0;
  uint32_t epoch = 0, generation = 0;

  __device__ __forceinline__ DeviceAtomic<uint32_t> abandoned() const {
    return DeviceAtomic<uint32_t>(exchange.own().abandoned);
  }
  __device__ __forceinline__ uint64_t gave_up(int rank) const {
    return SystemAtomic<uint64_t>(exchange.own().gave_up[rank]).load(cuda::std::memory_order_relaxed);
  }

  // By who decided that the exchange has failed.
  __device__ __forceinline__ void report(Fault fault, int rank, const peer::Tag& theirs) const {
    tell_host(exchange.report, {fault, uint32_t(exchange.rank), uint32_t(rank), epoch, exchange.tag, theirs});
    for (int peer = 0; peer < exchange.world; ++peer)
      if (peer != exchange.rank)
        SystemAtomic<uint64_t>(exchange.arenas[peer]->gave_up[exchange.rank])
            .store(peer::generation_at(uint64_t(generation) + 1, epoch), cuda::std::memory_order_relaxed);
    abandoned().store(1, cuda::std::memory_order_relaxed);
  }

  // Whether the exchange has failed: yes unless it was done before.
  __device__ __forceinline__ bool fail(Fault fault, int rank, const peer::Tag& theirs = {}) const {
    const Fault ended = end(fault);
    if (ended == peer::kPending) report(fault, rank, theirs);
    return ended != peer::kDone;
  }

  // Ends the exchange for all blocks, if nobody has: kPending then, else how it ended.
  __device__ __forceinline__ Fault end(Fault how) const {
    const DeviceAtomic<uint64_t> ended(exchange.own().ended);
    uint64_t seen = ended.load(cuda::std::memory_order_acquire);
    while (uint32_t(seen >> 32) != epoch)
      if (ended.compare_exchange_strong(seen, uint64_t(epoch) << 32 | how, cuda::std::memory_order_acq_rel))
        return peer::kPending;
    return Fault(uint32_t(seen));
  }

  // Waits until ready() holds; false if the exchange has failed.
  template <class Ready>
  __device__ __forceinline__ bool wait(int rank, const Ready& ready) const {
    while (!ready()) {
      const bool quit = gave_up(rank) >> 32 > generation, late = globaltimer() - begin > exchange.timeout;
      if (abandoned().load(cuda::std::memory_order_relaxed)) return false;
      if ((quit || late) && fail(quit ? peer::kGaveUp : peer::kTimeout, rank)) return false;
    }
    return true;
  }

 public:
  __device__ __forceinline__ explicit Poll(const Exchange& exchange) : exchange(exchange) {
    if (exchange.world == 0) return;
    begin = globaltimer();
    epoch = exchange.own().pushed;
    generation = exchange.own().generation;
  }
  __device__ __forceinline__ explicit operator bool() const { return exchange.world != 0; }

  // Waits for a rank's header; false if the exchange has failed.
  __device__ __forceinline__ bool header(int rank) const {
    if (abandoned().load(cuda::std::memory_order_relaxed)) return false;
    peer::Packet* const message = exchange.message(exchange.rank, rank, epoch);
    peer::Packet first, second;
    if (!wait(rank, [&] {
          first = load_packet(message), second = load_packet(message + 1);
          return arrived(first, epoch) && arrived(second, epoch);
        }))
      return false;
    const peer::Tag theirs = peer::tag_of(first, second);
    if (!same_exchange(theirs, exchange.tag)) return !fail(peer::kMismatch, rank, theirs);
    // A message that is there counts, unless its rank gave up this very exchange.
    return gave_up(rank) != peer::generation_at(uint64_t(generation) + 1, epoch) ||
           !fail(peer::kGaveUp, rank);
  }

  // Waits for pair i of a rank; false, and NaN, if the exchange has failed.
  template <class A>
  __device__ __forceinline__ bool pair(int rank, int64_t i, A& first, A& second) const {
    peer::Packet* const at =
        exchange.message(exchange.rank, rank, epoch) + peer::kHeaderPackets + i * kPairPackets<A>;
    uint32_t words[2 * kPairPackets<A>];
    const bool there = wait(rank, [&] {
      bool all = true;
#pragma unroll
      for (int k = 0; k < kPairPackets<A>; ++k) {
        const peer::Packet packet = load_packet(at + k);
        words[2 * k] = packet.word0;
        words[2 * k + 1] = packet.word1;
        all &= arrived(packet, epoch);
      }
      return all;
    });
    A numbers[2];
    memcpy(numbers, words, sizeof(words));
    first = there ? numbers[0] : A(NAN);
    second = there ? numbers[1] : A(NAN);
    return there;
  }

  // By the one that writes what outlives the launch, when all has arrived: whether it may.
  __device__ __forceinline__ bool done() const {
    const Fault ended = end(peer::kDone);
    return ended == peer::kPending || ended == peer::kDone;
  }

  // Ends an exchange that nobody will poll.
  __device__ __forceinline__ void give_up() const { (void)fail(peer::kGaveUp, exchange.rank); }

  // By one thread of the launch that has read what it needs: the next kernel pushes the next exchange.
  __device__ __forceinline__ void close() const { exchange.own().polled = epoch; }
};

// The headers of all ranks, by a block, all of whose threads call; false if the exchange has failed.
__device__ __forceinline__ bool await_headers(const Poll& poll, int world) {
  const bool failed = int(threadIdx.x) < world && !poll.header(int(threadIdx.x));
  return !__syncthreads_or(failed);
}

}  // namespace fastvit
