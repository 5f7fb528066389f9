// The peer protocol between GPUs: kernels push packets to their peers' memory, and the last blocks of a grid
// wait for the packets of the peers.
//
// Push     never waits. The thread with a channel's two numbers stores them to every rank, this one included,
//          so that all ranks are read in the same way. Block 0 sends the header before the slices are merged.
// Wait     in the last blocks of the grid to finish a tile, each for a part of the channels. There is one
// part
//          per batch of channels, at most 8, and at most one per 16 multiprocessors, so that the rest of the
//          GPU is free for the grid's other tiles and for other kernels, including those that the peers'
//          hosts wait for. A block polls its own GPU's memory: first the headers and the first packets, then
//          packets of up to 8 ranks in flight together, merged in rank order. A wait ends when all packets
//          have arrived, when a tag differs, when a rank gave up, or at the timeout by the GPU's clock.
// ExchangeState    The last part to end fills the whole result with NaN. The peers are notified, and the host by one
//          report. Exchanges that follow fail at once.
// Order    Between ranks: the flag of each packet, which travels with its data. Between the blocks of a grid:
//          the counters of finished tiles and of ended parts. Between the kernels of a rank: its stream.
#pragma once

#include <algorithm>
#include <cmath>

#include "../moments.h"
#include "../sync/protocol.h"
#include "merge_slices.cuh"
#include "ptx.cuh"

namespace fastvit {

using peer::Exchange;
using peer::ExchangeState;

// Pairs of numbers that a thread loads together; half as many of doubles, to save registers.
template <class A>
constexpr int kInFlight = 32 / int(sizeof(A));

constexpr int kMaxRanges = 8, kMultiprocessorsPerRange = 16;

// What a kernel takes for an exchange; empty without one.
template <bool kHasExchange>
struct ExchangeParams {
  Exchange group_exchange;
  unsigned max_ranges;  // blocks that wait
};
template <>
struct ExchangeParams<false> {};

// f(ExchangeParams<...>) for the exchange of an op's arguments, if any.
template <class A, class Args, class F>
void dispatch_exchange(const Args& args, const DeviceLimits& limits, const F& f) {
  if (!args.exchange) return f(ExchangeParams<false>{});
  int ranks = kInFlight<A>;
  while (ranks > 2 && args.exchange->world <= ranks / 2) ranks /= 2;  // as Wait::each
  const int64_t batches = ceil_div(args.layout.channels, kThreads * (kInFlight<A> / ranks));
  const int64_t most = std::clamp(limits.multiprocessors / kMultiprocessorsPerRange, 1, kMaxRanges);
  f(ExchangeParams<true>{*args.exchange, unsigned(std::clamp<int64_t>(batches, 1, most))});
}

// A word of this rank, which a block that sends nothing may read while the last part writes it.
__device__ __forceinline__ uint32_t read_word(uint32_t& word) {
  return DeviceAtomic<uint32_t>(word).load(cuda::std::memory_order_relaxed);
}

struct ChannelRange {  // of an exchange: the channels that one block waits for
  int begin, end;
  unsigned number = 0, parts = 1;
  unsigned* ended = nullptr;  // two zeros, for several parts: how many have ended, and whether one has failed
};

// f(part) in the blocks that wait, of those that finish a tile. `words` are kExchangeCounters zeros.
template <class F>
__device__ __forceinline__ void receive_in_last_blocks(const LaunchPlan& plan, unsigned max_ranges,
                                                       unsigned* words, const F& f) {
  const unsigned parts = min(max_ranges, plan.tiles), before = plan.tiles - parts;
  const unsigned turn = arrival_number(words, plan.tiles);
  if (turn < before) return;
  const int64_t C = plan.layout.channels, number = turn - before;
  f(ChannelRange{int(C * number / parts), int(C * (number + 1) / parts), unsigned(number), parts, words + 1});
}

template <class A>
class MessageSender {
  const Exchange& exchange;
  uint32_t epoch = 0;

  template <class At>
  __device__ __forceinline__ void to_all(const At& store) const {
    // From this rank on, so that ranks do not all write to one inbox.
    for (int turn = 0; turn < exchange.world; ++turn) {
      int peer = exchange.rank + turn;
      if (peer >= exchange.world) peer -= exchange.world;
      store(exchange.message(peer, exchange.rank, epoch));
    }
  }

 public:
  __device__ __forceinline__ explicit MessageSender(const Exchange& exchange) : exchange(exchange) {
    if (!read_word(exchange.own_arena().failed))
      epoch = peer::next_epoch(read_word(exchange.own_arena().epoch));
  }
  __device__ __forceinline__ void pair(int64_t i, A first, A second) const {
    if (epoch == 0) return;
    peer::Packet packets[peer::kPairPackets<A>];
    peer::Pair<A>{first, second}.pack(epoch, packets);
    to_all([&](peer::Packet* message) {
#pragma unroll
      for (int k = 0; k < peer::kPairPackets<A>; ++k)
        store_packet(message + peer::kHeaderPackets + i * peer::kPairPackets<A> + k, packets[k]);
    });
  }
  // All threads of the grid may call; one sends.
  __device__ __forceinline__ void header() const {
    if (epoch == 0 || blockIdx.x != 0 || threadIdx.x != 0) return;
    to_all([&](peer::Packet* message) {
      for (int i = 0; i < peer::kHeaderPackets; ++i)
        store_packet(message + i, header_packet(exchange.tag, i, epoch));
    });
  }
  // Of moments: with the number of this rank's values, pair C.
  __device__ __forceinline__ void header(int64_t C, double count) const {
    header();
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    A two[2];
    pack_count(two, count);
    pair(C, two[0], two[1]);
  }
};

// The end of a part of an exchange of C channels. All threads call.
template <class A>
class MessageReceiver {
  const Exchange& exchange;
  const ChannelRange part;
  const uint64_t begin;
  const uint32_t epoch;
  const bool abandoned;
  peer::FaultReport& report;  // shared by the block; `fault` is not 0 after a fault
  using Packets = peer::Packet[peer::kPairPackets<A>];
  struct Row {  // of the result; writes one channel's two numbers
    A* numbers;
    int C;
    __device__ __forceinline__ void operator()(int c, const double (&sums)[2]) const {
      numbers[c] = A(sums[0]);
      numbers[C + c] = A(sums[1]);
    }
  };

  __device__ __forceinline__ peer::Packet* message(int rank) const {
    return exchange.message(exchange.rank, rank, epoch);
  }
  __device__ __forceinline__ peer::Packet* pair(int rank, int64_t i) const {
    return message(rank) + peer::kHeaderPackets + i * peer::kPairPackets<A>;
  }
  __device__ __forceinline__ uint64_t gave_up(int rank) const {
    return SystemAtomic<uint64_t>(exchange.own_arena().abandoned_epoch_of[rank])
        .load(cuda::std::memory_order_relaxed);
  }

  __device__ __forceinline__ bool fail(ExchangeState fault, int rank, const peer::Tag& theirs = {}) const {
    if (atomicCAS(&report.fault, 0u, uint32_t(fault)) == 0) {
      report.rank = uint32_t(exchange.rank), report.peer = uint32_t(rank), report.epoch = epoch;
      report.own_tag = exchange.tag, report.peer_tag = theirs;
    }
    return false;
  }
  // Called while packets of a rank are missing; false when the thread must stop waiting.
  __device__ __forceinline__ bool keep_waiting(int rank) const {
    if (gave_up(rank) != 0) return fail(peer::kPeerAbandoned, rank);
    // Signed, since the clock of another multiprocessor may be a tick behind.
    return int64_t(globaltimer() - begin) <= int64_t(exchange.timeout_ns) || fail(peer::kTimeout, rank);
  }

  // Waits for a rank's header, and for the count, pair `i` of moments (none for i < 0).
  __device__ __forceinline__ bool header(int rank, int64_t i, A (&count)[2]) const {
    peer::Packet head[peer::kHeaderPackets];
    Packets packets;
    peer::Pair<A> two{};
    while (true) {
      for (int k = 0; k < peer::kHeaderPackets; ++k) head[k] = load_packet(message(rank) + k);
      for (int k = 0; k < peer::kPairPackets<A> && i >= 0; ++k) packets[k] = load_packet(pair(rank, i) + k);
      const uint64_t quit = gave_up(rank);
      if (arrived(head[0], epoch) && arrived(head[1], epoch)) {
        const peer::Tag theirs = peer::tag_from_header(head[0], head[1]);
        if (!tags_match(theirs, exchange.tag)) return fail(peer::kMismatch, rank, theirs);
        // A complete message is valid, unless its rank gave up this same exchange.
        if (quit == epoch) return fail(peer::kPeerAbandoned, rank);
        if (i < 0 || two.unpack(epoch, packets)) break;
      }
      if (!keep_waiting(rank)) return false;
    }
    count[0] = two.first, count[1] = two.second;
    return true;
  }

  // use(rank, pair, sums) for a thread's pairs of all ranks in rank order, then write(i, sums). The first
  // loads are in flight while all threads call agree(), which tells whether the headers are those of this
  // exchange. Up to kRanks ranks load together, with as many pairs as kInFlight allows. A load past the last
  // rank or pair repeats the last one, because the compiler waits between conditional loads.
  template <int kRanks, class Agree, class Use, class Write>
  __device__ __forceinline__ bool each(const Agree& agree, const Use& use, const Write& write) const {
    constexpr int kPairs = kInFlight<A> / kRanks;
    if constexpr (kRanks > 2)
      if (exchange.world <= kRanks / 2) return each<kRanks / 2>(agree, use, write);
    Packets packets[kPairs][kRanks];
    int pair0 = part.begin + int(threadIdx.x);
    if (!abandoned) load(pair0, 0, packets);
    if (threadIdx.x == 0)
      report.fault = abandoned ? peer::kDone : peer::kPending;  // kDone: an earlier one was reported
    __syncthreads();
    if (abandoned || !agree()) return false;
    const int ranks = kRanks < kInFlight<A> ? kRanks : exchange.world;  // one pass where ranks are few
    for (bool loaded = true; pair0 < part.end; pair0 += kThreads * kPairs) {
      double sums[kPairs][2] = {};
      for (int first = 0; first < ranks; first += kRanks) {
        peer::Pair<A> pairs[kPairs][kRanks];
        while (true) {
          if (!loaded) load(pair0, first, packets);
          loaded = false;
          const int missing = unpack(first, packets, pairs);
          if (missing < 0) break;
          if (!keep_waiting(missing)) return false;
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
#pragma unroll
          for (int p = 0; p < kPairs; ++p)
            if (first + r < exchange.world) use(first + r, pairs[p][r], sums[p]);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        if (pair0 + p * kThreads < part.end) write(pair0 + p * kThreads, sums[p]);
    }
    return true;
  }
  template <int kPairs, int kRanks>
  __device__ __forceinline__ void load(int pair0, int first, Packets (&packets)[kPairs][kRanks]) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
#pragma unroll
        for (int k = 0; k < peer::kPairPackets<A>; ++k)
          packets[p][r][k] = load_packet(
              pair(min(first + r, exchange.world - 1), min(pair0 + p * kThreads, part.end - 1)) + k);
  }
  // The first rank of which something is missing, or -1.
  template <int kPairs, int kRanks>
  __device__ __forceinline__ int unpack(int first, const Packets (&packets)[kPairs][kRanks],
                                        peer::Pair<A> (&pairs)[kPairs][kRanks]) const {
    int missing = -1;
#pragma unroll
    for (int r = kRanks - 1; r >= 0; --r)
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        if (!pairs[p][r].unpack(epoch, packets[p][r])) missing = min(first + r, exchange.world - 1);
    return missing;
  }

  // Ends the part, and in the last part the exchange. A fault of one part makes all `numbers` of the row NaN.
  // The first failed part reports to the host, every failed part to the peers. All threads call.
  __device__ __forceinline__ void end(bool good, A* row, int64_t numbers) const {
    bool failed = __syncthreads_or(!good);
    unsigned* const any = part.ended + 1;
    if (failed && report.fault != peer::kDone) {
      if (threadIdx.x == 0 && (part.parts == 1 || atomicExch(any, 1u) == 0))
        write_fault_report(exchange.report, report);
      if (int(threadIdx.x) < exchange.world && int(threadIdx.x) != exchange.rank)
        SystemAtomic<uint64_t>(exchange.arenas[threadIdx.x]->abandoned_epoch_of[exchange.rank])
            .store(uint64_t(epoch), cuda::std::memory_order_relaxed);
    }
    if (part.parts > 1) {
      if (!arrives_last(part.ended, part.parts)) return;
      failed = __syncthreads_or(threadIdx.x == 0 && atomicExch(any, 0u) != 0) || failed;
    }
    if (threadIdx.x == 0)
      DeviceAtomic<uint32_t>(failed ? exchange.own_arena().failed : exchange.own_arena().epoch)
          .store(failed ? 1 : epoch, cuda::std::memory_order_relaxed);
    for (int64_t i = threadIdx.x; failed && i < numbers; i += kThreads) row[i] = A(NAN);
  }

 public:
  __device__ __forceinline__ MessageReceiver(const Exchange& exchange, const ChannelRange& part,
                                             peer::FaultReport& report)
      : exchange(exchange),
        part(part),
        begin(globaltimer()),
        epoch(peer::next_epoch(read_word(exchange.own_arena().epoch))),
        abandoned(read_word(exchange.own_arena().failed) != 0),
        report(report) {}

  // `row`, [2C + 2], gets the moments of all ranks. The counts come first, since the weights of the ranks are
  // the same for all channels.
  __device__ __forceinline__ void moments(A* row, int64_t C, MergeWeights* weights, double* counts) const {
    const auto agree = [&] {
      bool good = true;
      if (const int rank = int(threadIdx.x); rank < exchange.world) {
        A two[2];
        good = header(rank, C, two);
        counts[rank] = good ? unpack_count(two) : 0;
      }
      good = !__syncthreads_or(!good);
      if (const int rank = int(threadIdx.x); good && rank <= exchange.world) {
        double before = 0;
        for (int r = 0; r < rank; ++r) before += counts[r];
        if (rank < exchange.world)
          weights[rank] = MergeWeights::of_counts(before, counts[rank]);
        else if (part.number == 0)
          pack_count(row + 2 * C, before);
      }
      __syncthreads();
      return good;
    };
    const auto merge = [&](int r, const peer::Pair<A>& pair, double(&sums)[2]) {
      weights[r].merge(sums[0], sums[1], pair.first, pair.second);
    };
    end(each<kInFlight<A>>(agree, merge, Row{row, int(C)}), row, 2 * C + 2);
  }

  // `row`, [2C], gets the sums of all ranks, added in rank order.
  __device__ __forceinline__ void sums(A* row, int64_t C) const {
    const auto agree = [&] {
      A none[2];
      const int rank = int(threadIdx.x);
      return !__syncthreads_or(rank < exchange.world && !header(rank, -1, none));
    };
    const auto add = [](int, const peer::Pair<A>& pair, double(&sums)[2]) {
      sums[0] += pair.first, sums[1] += pair.second;
    };
    end(each<kInFlight<A>>(agree, add, Row{row, int(C)}), row, 2 * C);
  }
};

// A block's part in an exchange of moments.
template <class A>
__device__ __forceinline__ void receive_moments(const Exchange& exchange, const ChannelRange& part, A* row,
                                                int64_t C) {
  static_assert(peer::kMaxRanks < kThreads);
  __shared__ peer::FaultReport report;
  __shared__ MergeWeights weights[peer::kMaxRanks];
  __shared__ double counts[peer::kMaxRanks];
  MessageReceiver<A>(exchange, part, report).moments(row, C, weights, counts);
}

template <class A>
__device__ __forceinline__ void receive_sums(const Exchange& exchange, const ChannelRange& part, A* row,
                                             int64_t C) {
  __shared__ peer::FaultReport report;
  MessageReceiver<A>(exchange, part, report).sums(row, C);
}

}  // namespace fastvit
