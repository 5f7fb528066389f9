// The peer protocol between GPUs: kernels push packets to their peers' memory, and one block of a grid waits
// for the packets of the peers.
//
// Push     never waits. The thread with a channel's two numbers stores them to every rank, this one included,
//          so that all ranks are read in the same way.
// Wait     in the last block of the grid to finish, which also sends the header. The rest of the GPU is free
//          for other kernels, including those that the peers' hosts wait for. The block polls local memory,
//          with up to 8 ranks of one channel, or fewer ranks of several, in flight together, and merges in
//          rank order. A wait ends by a different tag, by a rank that gave up, or by the timeout, measured
//          by the GPU's clock.
// Fault    The whole result is NaN. The peers are notified, and the host by a report. Until all ranks are
//          back, exchanges fail at once.
// Order    Between ranks: the flag of each packet, which travels with its data. Between the blocks of a grid:
//          the counter that selects the last block. Between the kernels of a rank: its stream.
#pragma once

#include <cmath>

#include "../cuda/plan.h"
#include "../cuda/ptx.cuh"
#include "../moments.h"
#include "protocol.h"

namespace fastvit {

using peer::Exchange;
using peer::Fault;

// Pairs of numbers that a thread loads together; half as many of doubles, to save registers.
template <class A>
constexpr int kInFlight = 32 / int(sizeof(A));

// The exchange argument of a kernel; empty without one.
template <bool kShared>
struct Shares {
  Exchange exchange;
};
template <>
struct Shares<false> {};

// f(Shares<...>) with or without an exchange.
template <class F>
void with_shares(const Exchange* exchange, const F& f) {
  exchange ? f(Shares<true>{*exchange}) : f(Shares<false>{});
}

template <class A>
class Push {
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
  __device__ __forceinline__ explicit Push(const Exchange& exchange) : exchange(exchange) {
    if (!exchange.own().abandoned) epoch = peer::next_epoch(exchange.own().epoch);
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
  __device__ __forceinline__ void header() const {
    if (epoch == 0) return;
    to_all([&](peer::Packet* message) {
      for (int i = 0; i < peer::kHeaderPackets; ++i)
        store_packet(message + i, header_packet(exchange.tag, i, epoch));
    });
  }
};

// The end of an exchange of C channels, in the last block of a grid. All threads call.
template <class A>
class Wait {
  const Exchange& exchange;
  const uint64_t begin;
  const uint32_t epoch;
  peer::FaultReport& blame;  // shared by the block; `fault` is not 0 after a fault
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
    return SystemAtomic<uint64_t>(exchange.own().gave_up[rank]).load(cuda::std::memory_order_relaxed);
  }

  __device__ __forceinline__ bool fail(Fault fault, int rank, const peer::Tag& theirs = {}) const {
    if (atomicCAS(&blame.fault, 0u, uint32_t(fault)) == 0) {
      blame.rank = uint32_t(exchange.rank), blame.peer = uint32_t(rank), blame.epoch = epoch;
      blame.mine = exchange.tag, blame.theirs = theirs;
    }
    return false;
  }
  // Called while packets of a rank are missing; false when the thread must stop waiting.
  __device__ __forceinline__ bool patient(int rank) const {
    if (gave_up(rank) != 0) return fail(peer::kGaveUp, rank);
    // Signed, since the clock of another multiprocessor may be a tick behind.
    return int64_t(globaltimer() - begin) <= int64_t(exchange.nanoseconds) || fail(peer::kTimeout, rank);
  }

  // Waits for a rank's header, and for the count, pair `i` of moments (none for i < 0).
  __device__ __forceinline__ bool header(int rank, int64_t i, A (&count)[2]) const {
    peer::Packet head[peer::kHeaderPackets];
    Packets packets;
    uint64_t quit;
    peer::Pair<A> two{};
    while (true) {
      {
        const Together together;
        for (int k = 0; k < peer::kHeaderPackets; ++k) head[k] = load_packet(message(rank) + k);
        for (int k = 0; k < peer::kPairPackets<A> && i >= 0; ++k) packets[k] = load_packet(pair(rank, i) + k);
        quit = gave_up(rank);
      }
      if (arrived(head[0], epoch) && arrived(head[1], epoch)) {
        const peer::Tag theirs = peer::tag_of(head[0], head[1]);
        if (!same_exchange(theirs, exchange.tag)) return fail(peer::kMismatch, rank, theirs);
        // A complete message is valid, unless its rank gave up this same exchange.
        if (quit == epoch) return fail(peer::kGaveUp, rank);
        if (i < 0 || two.unpack(epoch, packets)) break;
      }
      if (!patient(rank)) return false;
    }
    count[0] = two.first, count[1] = two.second;
    return true;
  }

  // A thread's part of all C pairs: use(rank, pair, sums) for all ranks in rank order, then write(i, sums).
  // Up to kRanks ranks are loaded together, for as many pairs as are in flight with them. Missing ranks and
  // pairs repeat the last, since the compiler puts a wait between loads that have conditions.
  template <int kRanks, class Use, class Write>
  __device__ __forceinline__ bool each(int C, const Use& use, const Write& write) const {
    constexpr int kPairs = kInFlight<A> / kRanks;
    if constexpr (kRanks > 2)
      if (exchange.world <= kRanks / 2) return each<kRanks / 2>(C, use, write);
    for (int pair0 = threadIdx.x; pair0 < C; pair0 += kThreads * kPairs) {
      double sums[kPairs][2] = {};
      const int ranks = kRanks < kInFlight<A> ? kRanks : exchange.world;  // one pass where ranks are few
      for (int first = 0; first < ranks; first += kRanks) {
        peer::Pair<A> pairs[kPairs][kRanks];
        for (int missing; (missing = load(pair0, C, first, pairs)) >= 0;)
          if (!patient(missing)) return false;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
#pragma unroll
          for (int p = 0; p < kPairs; ++p)
            if (first + r < exchange.world) use(first + r, pairs[p][r], sums[p]);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        if (pair0 + p * kThreads < C) write(pair0 + p * kThreads, sums[p]);
    }
    return true;
  }
  // The first rank of which something is missing, or -1.
  template <int kPairs, int kRanks>
  __device__ __forceinline__ int load(int pair0, int C, int first,
                                      peer::Pair<A> (&pairs)[kPairs][kRanks]) const {
    Packets packets[kPairs][kRanks];
    {
      const Together together;
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
#pragma unroll
          for (int k = 0; k < peer::kPairPackets<A>; ++k)
            packets[p][r][k] =
                load_packet(pair(min(first + r, exchange.world - 1), min(pair0 + p * kThreads, C - 1)) + k);
    }
    int missing = -1;
#pragma unroll
    for (int r = kRanks - 1; r >= 0; --r)
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        if (!pairs[p][r].unpack(epoch, packets[p][r])) missing = min(first + r, exchange.world - 1);
    return missing;
  }

  // Ends the exchange; reports a fault to the host and the peers. All threads call.
  __device__ __forceinline__ bool end(bool good) const {
    if (!__syncthreads_or(!good)) {
      if (threadIdx.x == 0) exchange.own().epoch = epoch;
      return true;
    }
    if (threadIdx.x == 0 && blame.fault != peer::kDone) {
      tell_host(exchange.report, blame);
      exchange.own().abandoned = 1;
    }
    if (int(threadIdx.x) < exchange.world && int(threadIdx.x) != exchange.rank && blame.fault != peer::kDone)
      SystemAtomic<uint64_t>(exchange.arenas[threadIdx.x]->gave_up[exchange.rank])
          .store(uint64_t(epoch), cuda::std::memory_order_relaxed);
    return false;
  }

  __device__ __forceinline__ bool abandoned() const {
    const bool before = exchange.own().abandoned;
    if (threadIdx.x == 0) blame.fault = before ? peer::kDone : peer::kPending;  // kDone: reported before
    __syncthreads();
    return before;
  }

 public:
  __device__ __forceinline__ Wait(const Exchange& exchange, peer::FaultReport& blame)
      : exchange(exchange),
        begin(globaltimer()),
        epoch(peer::next_epoch(exchange.own().epoch)),
        blame(blame) {}

  // `row`, [2C + 2], gets the moments of all ranks. The counts come first, since the weights of the ranks are
  // the same for all channels.
  __device__ __forceinline__ void moments(A* row, int64_t C, Joining* joining, double* counts) const {
    bool good = !abandoned();
    if (const int rank = int(threadIdx.x); good && rank < exchange.world) {
      A two[2];
      good = header(rank, C, two);
      counts[rank] = good ? load_count(two) : 0;
    }
    good = !__syncthreads_or(!good);
    if (const int rank = int(threadIdx.x); good && rank <= exchange.world) {
      double before = 0;
      for (int r = 0; r < rank; ++r) before += counts[r];
      if (rank < exchange.world)
        joining[rank] = Joining::of(before, counts[rank]);
      else
        store_count(row + 2 * C, before);
    }
    __syncthreads();
    const auto join = [&](int r, const peer::Pair<A>& pair, double(&sums)[2]) {
      joining[r].join(sums[0], sums[1], pair.first, pair.second);
    };
    good = good && each<kInFlight<A>>(int(C), join, Row{row, int(C)});
    if (!end(good))
      for (int64_t i = threadIdx.x; i < 2 * C + 2; i += kThreads) row[i] = A(NAN);
  }

  // `row`, [2C], gets the sums of all ranks, added in rank order.
  __device__ __forceinline__ void sums(A* row, int64_t C) const {
    bool good = !abandoned();
    A none[2];
    if (good && int(threadIdx.x) < exchange.world) good = header(int(threadIdx.x), -1, none);
    good = !__syncthreads_or(!good);
    const auto add = [](int, const peer::Pair<A>& pair, double(&sums)[2]) {
      sums[0] += pair.first, sums[1] += pair.second;
    };
    good = good && each<kInFlight<A>>(int(C), add, Row{row, int(C)});
    if (!end(good))
      for (int64_t i = threadIdx.x; i < 2 * C; i += kThreads) row[i] = A(NAN);
  }
};

// The last block's part in an exchange of moments of `count` values.
template <class A>
__device__ __forceinline__ void end_moments(const Exchange& exchange, A* row, int64_t C, double count) {
  static_assert(peer::kMostRanks < kThreads);
  __shared__ peer::FaultReport blame;
  __shared__ Joining joining[peer::kMostRanks];
  __shared__ double counts[peer::kMostRanks];
  if (threadIdx.x == 0) {
    const Push<A> push(exchange);
    A two[2];
    store_count(two, count);
    push.header();
    push.pair(C, two[0], two[1]);
  }
  Wait<A>(exchange, blame).moments(row, C, joining, counts);
}

template <class A>
__device__ __forceinline__ void end_sums(const Exchange& exchange, A* row, int64_t C) {
  __shared__ peer::FaultReport blame;
  if (threadIdx.x == 0) Push<A>(exchange).header();
  Wait<A>(exchange, blame).sums(row, C);
}

}  // namespace fastvit
