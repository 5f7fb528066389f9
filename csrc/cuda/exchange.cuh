// The peer protocol (sync/protocol.h) between the GPUs of the ranks (processes) of a process group. The
// blocks of a grid send moments (mean, M2 and count) or sums of channels to the memory of all ranks
// (MessageSender). The last blocks of the grid receive the messages of all ranks and merge them.
//
// Send:  never waits. The thread that has a channel's two numbers stores them to the arena of every rank:
//        memory that all ranks can write. An arena has an inbox, with slots for the messages of each sender.
// Wait:  in the last blocks to finish, each for a range of channels: as many as it loads at once. There are
//        at most 8 ranges, and at most one per 16 multiprocessors, so ranges may be larger. The rest of the
//        GPU stays free for the grid's other blocks, and for other kernels on this GPU, such as NCCL's: it
//        can be that a peer (another rank) launches its part of the exchange after a collective that needs
//        this GPU. A wait ends when all packets have arrived, a tag (by which ranks see that they are in the
//        same exchange) differs, a rank has abandoned its exchange (stopped waiting after a fault), or the
//        timeout is over.
// Fault: the last range to end fills the whole result with NaN. Peers are notified, the host gets one
//        report, and every later exchange fails at once.
// Order: another rank knows by the epoch (the exchange's number) in each packet of 16 bytes that the packet
//        has been written. Counters order writes for other blocks, the stream for the next kernel.
#pragma once

#include <algorithm>
#include <cmath>

#include "../moments.h"
#include "../sync/protocol.h"
#include "merge_slices.cuh"
#include "message_sender.cuh"
#include "ptx.cuh"

namespace fastvit {

using peer::ExchangeState;

// How many pairs (a pair is the two numbers of one channel of one rank) a thread loads together: fewer pairs
// of doubles, to save registers. A: float or double, the type of the numbers.
template <class A>
constexpr int kPairsInFlight = 32 / int(sizeof(A));

constexpr int kMaxRanges = 8, kMultiprocessorsPerRange = 16;

// The part of a kernel's parameters that describes an exchange; empty for a kernel without one.
template <bool kHasExchange>
struct ExchangeParams {
  Exchange group_exchange;  // *args.exchange; KernelParams finds this name, and delays the next kernel
  unsigned max_ranges;      // how many blocks wait at most
};
template <>
struct ExchangeParams<false> {};

template <class Args>
struct PlannedArgs : Args {
  LaunchPlan plan;
};
// The parameters of a kernel that reduces the values of each channel, perhaps over all ranks. Args: the op's
// arguments. R: the result of a slice, a share of a channel's values, for one channel.
template <class Args, class R, bool kHasExchange>
struct ReductionParams : PlannedArgs<Args>, ExchangeParams<kHasExchange> {
  SliceResults<R> slice_results;  // in global memory, until they are merged
  unsigned* exchange_counters;    // [kExchangeCounters]: finished tiles, ended ranges, whether one failed
};

// Calls f(ExchangeParams<true>{...}) for args.exchange, or f(ExchangeParams<false>{}) if that is null.
template <class A, class Args, class F>
void dispatch_exchange(const Args& args, const DeviceLimits& limits, const F& f) {
  if (!args.exchange) return f(ExchangeParams<false>{});
  int ranks_in_flight = kPairsInFlight<A>;  // halved as kRanks is in receive_pairs
  while (ranks_in_flight > 2 && args.exchange->world <= ranks_in_flight / 2) ranks_in_flight /= 2;
  const int64_t channels_in_flight = kThreads * (kPairsInFlight<A> / ranks_in_flight);
  const int64_t load_rounds = ceil_div(args.layout.channels, channels_in_flight);
  const int64_t max_ranges = std::clamp(limits.multiprocessors / kMultiprocessorsPerRange, 1, kMaxRanges);
  f(ExchangeParams<true>{*args.exchange, unsigned(std::clamp<int64_t>(load_rounds, 1, max_ranges))});
}

// The channels of an exchange that one block waits for.
struct ChannelRange {
  int begin, end;
  unsigned index = 0, range_count = 1;  // range `index` of `range_count`
  // Two counters, zero at first: how many ranges have ended, and whether one has failed. Unused, and may be
  // null, if there is one range.
  unsigned* end_counters = nullptr;
};

// Called by each block that finishes a tile (a set of channels whose numbers the block has sent). Calls
// f(range) in the last of these blocks, at most max_ranges of them, each with its own range of channels.
// The kExchangeCounters `counters` are zero before and after the launch: the last block to finish a tile
// resets the first, and the last range to end the other two.
template <class F>
__device__ __forceinline__ void receive_in_last_blocks(const LaunchPlan& plan, unsigned max_ranges,
                                                       unsigned* counters, const F& f) {
  const unsigned range_count = min(max_ranges, plan.tiles), first_to_wait = plan.tiles - range_count;
  const unsigned arrival = arrival_number(counters, plan.tiles);
  if (arrival < first_to_wait) return;
  const int64_t C = plan.layout.channels, index = arrival - first_to_wait;
  f(ChannelRange{int(C * index / range_count), int(C * (index + 1) / range_count), unsigned(index),
                 range_count, counters + 1});
}

// Receives a range of channels from all ranks, and ends the exchange after the last range. All threads of the
// block call the public functions. A: float or double, the type of the numbers.
template <class A>
class MessageReceiver {
  const Exchange& exchange;
  const ChannelRange range;
  const uint64_t begin_ns;
  const uint32_t epoch;       // of this exchange
  const bool has_failed;      // an earlier exchange has failed
  peer::FaultReport& report;  // in the block's shared memory; `fault` is kPending before a fault
  using PairPackets = peer::Packet[peer::kPacketsPerPair<A>];
  // The value of report.fault if an earlier exchange has failed: the host has a report already, so this
  // exchange writes none. kDone is free for this: otherwise report.fault is kPending or a fault.
  static constexpr ExchangeState kAlreadyReported = peer::kDone;

  // Writes the two merged numbers of channel c to the result, [2][C]. The count of moments comes after these
  // 2C numbers; receive_moments writes it.
  struct ResultWriter {
    A* result;
    int C;
    __device__ __forceinline__ void operator()(int c, const double (&numbers)[2]) const {
      result[c] = A(numbers[0]);
      result[C + c] = A(numbers[1]);
    }
  };

  // Returns the beginning of a rank's message in this rank's inbox.
  __device__ __forceinline__ peer::Packet* message_of(int rank) const {
    return exchange.inbox_slot(exchange.rank, rank, epoch);
  }
  // The first packet of pair i of a rank's message.
  __device__ __forceinline__ peer::Packet* pair_of(int rank, int64_t i) const {
    return message_of(rank) + peer::kHeaderPackets + i * peer::kPacketsPerPair<A>;
  }
  // The epoch of the exchange that a rank has abandoned, or 0.
  __device__ __forceinline__ uint64_t abandoned_epoch_of(int rank) const {
    return SystemAtomic<uint64_t>(exchange.own_arena().abandoned_epoch_of[rank])
        .load(cuda::std::memory_order_relaxed);
  }

  // Writes a fault to the block's report, unless the report has one already. Returns false.
  __device__ __forceinline__ bool fail(ExchangeState fault, int rank, const peer::Tag& peer_tag = {}) const {
    if (atomicCAS(&report.fault, uint32_t(peer::kPending), uint32_t(fault)) == peer::kPending) {
      report.rank = uint32_t(exchange.rank), report.peer = uint32_t(rank), report.epoch = epoch;
      report.own_tag = exchange.tag, report.peer_tag = peer_tag;
    }
    return false;
  }
  // Called while packets of a rank are missing. Returns false when the thread must stop waiting: after the
  // timeout, or if the rank has abandoned any exchange, since it then sends nothing more.
  __device__ __forceinline__ bool keep_waiting(int rank) const {
    if (abandoned_epoch_of(rank) != 0) return fail(peer::kPeerAbandoned, rank);
    // The difference is signed, because the clock may read a tick less than at the beginning.
    return int64_t(globaltimer() - begin_ns) <= int64_t(exchange.timeout_ns) || fail(peer::kTimeout, rank);
  }

  static constexpr int64_t kNoCount = -1;
  // Waits for the header of a rank's message, and for the count of its moments, which is pair `count_pair` of
  // the message. Sums have no count: pass kNoCount. Returns false after a fault.
  __device__ __forceinline__ bool wait_for_header(int rank, int64_t count_pair, A (&packed_count)[2]) const {
    peer::Packet header[peer::kHeaderPackets];
    PairPackets packets;
    peer::Pair<A> count{};
    while (true) {
      for (int k = 0; k < peer::kHeaderPackets; ++k) header[k] = load_packet(message_of(rank) + k);
      for (int k = 0; k < peer::kPacketsPerPair<A> && count_pair >= 0; ++k)
        packets[k] = load_packet(pair_of(rank, count_pair) + k);
      const uint64_t abandoned_epoch = abandoned_epoch_of(rank);
      if (has_arrived(header[0], epoch) && has_arrived(header[1], epoch)) {
        const peer::Tag peer_tag = peer::tag_from_header(header[0], header[1]);
        if (!tags_match(peer_tag, exchange.tag)) return fail(peer::kMismatch, rank, peer_tag);
        // The exchange of a peer that has abandoned it fails here too, although its message has arrived.
        if (abandoned_epoch == epoch) return fail(peer::kPeerAbandoned, rank);
        if (count_pair < 0 || count.unpack(epoch, packets)) break;
      }
      if (!keep_waiting(rank)) return false;
    }
    packed_count[0] = count.first, packed_count[1] = count.second;
    return true;
  }

  // Each thread receives every kThreads-th channel of the range. For each of its channels it calls
  // merge(rank, pair, numbers) in the order of ranks, and then write(channel, numbers). The first loads are
  // in flight while all threads call wait_for_headers(), which returns whether all headers are those of this
  // exchange. Returns false after a fault. kRanks: ranks whose pairs are loaded together, for as many
  // channels as kPairsInFlight allows. kRanks is halved, down to 2, while half of it covers all ranks.
  template <int kRanks, class WaitForHeaders, class Merge, class Write>
  __device__ __forceinline__ bool receive_pairs(const WaitForHeaders& wait_for_headers, const Merge& merge,
                                                const Write& write) const {
    constexpr int kChannels = kPairsInFlight<A> / kRanks;
    if constexpr (kRanks > 2)
      if (exchange.world <= kRanks / 2) return receive_pairs<kRanks / 2>(wait_for_headers, merge, write);
    PairPackets packets[kChannels][kRanks];
    int channel = range.begin + int(threadIdx.x);
    if (!has_failed) load_pairs(channel, /*first_rank=*/0, packets);
    if (threadIdx.x == 0)
      report.fault = has_failed ? kAlreadyReported : peer::kPending;  // kPending: no fault yet
    __syncthreads();
    if (has_failed || !wait_for_headers()) return false;
    // A kRanks that was halved covers all ranks, so the loop over ranks has one turn, known at compile time.
    const int ranks = kRanks < kPairsInFlight<A> ? kRanks : exchange.world;
    for (bool is_loaded = true; channel < range.end; channel += kThreads * kChannels) {
      double numbers[kChannels][2] = {};
      for (int first_rank = 0; first_rank < ranks; first_rank += kRanks) {
        peer::Pair<A> pairs[kChannels][kRanks];
        while (true) {
          if (!is_loaded) load_pairs(channel, first_rank, packets);
          is_loaded = false;
          const int missing_rank = unpack_pairs(first_rank, packets, pairs);
          if (missing_rank < 0) break;
          if (!keep_waiting(missing_rank)) return false;
        }
        merge_pairs(first_rank, pairs, numbers, merge);
      }
      write_channels(channel, numbers, write);
    }
    return true;
  }
  template <int kChannels, int kRanks, class Merge>
  __device__ __forceinline__ void merge_pairs(int first_rank, const peer::Pair<A> (&pairs)[kChannels][kRanks],
                                              double (&numbers)[kChannels][2], const Merge& merge) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
#pragma unroll
      for (int j = 0; j < kChannels; ++j)
        if (first_rank + r < exchange.world) merge(first_rank + r, pairs[j][r], numbers[j]);
  }
  template <int kChannels, class Write>
  __device__ __forceinline__ void write_channels(int channel, const double (&numbers)[kChannels][2],
                                                 const Write& write) const {
#pragma unroll
    for (int j = 0; j < kChannels; ++j)
      if (channel + j * kThreads < range.end) write(channel + j * kThreads, numbers[j]);
  }
  // Past the last rank or channel the last one is loaded again, because the compiled code would wait for each
  // conditional load before the next.
  template <int kChannels, int kRanks>
  __device__ __forceinline__ void load_pairs(int channel, int first_rank,
                                             PairPackets (&packets)[kChannels][kRanks]) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
#pragma unroll
      for (int j = 0; j < kChannels; ++j)
#pragma unroll
        for (int k = 0; k < peer::kPacketsPerPair<A>; ++k)
          packets[j][r][k] = load_packet(
              pair_of(min(first_rank + r, exchange.world - 1), min(channel + j * kThreads, range.end - 1)) +
              k);
  }
  // Returns the first rank of which a packet is missing, or -1.
  template <int kChannels, int kRanks>
  __device__ __forceinline__ int unpack_pairs(int first_rank, const PairPackets (&packets)[kChannels][kRanks],
                                              peer::Pair<A> (&pairs)[kChannels][kRanks]) const {
    int missing_rank = -1;
#pragma unroll
    for (int r = kRanks - 1; r >= 0; --r)
#pragma unroll
      for (int j = 0; j < kChannels; ++j)
        if (!pairs[j][r].unpack(epoch, packets[j][r])) missing_rank = min(first_rank + r, exchange.world - 1);
    return missing_rank;
  }

  // The first failed range of a grid sets `any_failed` and reports to the host; every failed range notifies
  // the peers. All threads call.
  __device__ __forceinline__ void report_failure(unsigned* any_failed) const {
    if (threadIdx.x == 0 && (range.range_count == 1 || atomicExch(any_failed, 1u) == 0))
      write_fault_report(exchange.report, report);
    if (int(threadIdx.x) < exchange.world && int(threadIdx.x) != exchange.rank)
      SystemAtomic<uint64_t>(exchange.arenas[threadIdx.x]->abandoned_epoch_of[exchange.rank])
          .store(uint64_t(epoch), cuda::std::memory_order_relaxed);
  }
  // Ends the range. The last range ends the exchange: it writes the arena's `epoch` or, after a fault of any
  // range, `failed`, and NaN to all `n` numbers of the result. All threads call.
  __device__ __forceinline__ void finish_range(bool is_good, A* result, int64_t n) const {
    bool is_fault = __syncthreads_or(!is_good);
    unsigned* const any_failed = range.end_counters + 1;
    if (is_fault && report.fault != kAlreadyReported) report_failure(any_failed);
    if (range.range_count > 1) {
      if (!arrives_last(range.end_counters, range.range_count)) return;
      is_fault = __syncthreads_or(threadIdx.x == 0 && atomicExch(any_failed, 0u) != 0) || is_fault;
    }
    if (threadIdx.x == 0)
      DeviceAtomic<uint32_t>(is_fault ? exchange.own_arena().failed : exchange.own_arena().epoch)
          .store(is_fault ? 1 : epoch, cuda::std::memory_order_relaxed);
    for (int64_t i = threadIdx.x; is_fault && i < n; i += kThreads) result[i] = A(NAN);
  }

 public:
  __device__ __forceinline__ MessageReceiver(const Exchange& exchange, const ChannelRange& range,
                                             peer::FaultReport& report)
      : exchange(exchange),
        range(range),
        begin_ns(globaltimer()),
        epoch(peer::next_epoch(load_arena_word(exchange.own_arena().epoch))),
        has_failed(load_arena_word(exchange.own_arena().failed) != 0),
        report(report) {}

  // Writes the merged moments of all ranks to `result`, [2C + 2]: mean[C], M2[C] and the count, stored as two
  // numbers. The counts are received first, because the weights by which ranks are merged are the same for
  // all channels. `weights` and `counts` are shared memory with an element for each rank.
  __device__ __forceinline__ void receive_moments(A* result, int64_t C, MergeWeights* weights,
                                                  double* counts) const {
    const auto wait_for_headers = [&] {
      bool is_good = true;
      if (const int rank = int(threadIdx.x); rank < exchange.world) {
        A packed_count[2];
        is_good = wait_for_header(rank, C, packed_count);
        counts[rank] = is_good ? unpack_count(packed_count) : 0;
      }
      is_good = !__syncthreads_or(!is_good);
      if (const int rank = int(threadIdx.x); is_good && rank <= exchange.world) {
        double count = 0;  // how many values the ranks before `rank` have; if rank == world, all ranks
        for (int r = 0; r < rank; ++r) count += counts[r];
        if (rank < exchange.world)
          weights[rank] = MergeWeights::from_counts(count, counts[rank]);
        else if (range.index == 0)
          pack_count(result + 2 * C, count);
      }
      __syncthreads();
      return is_good;
    };
    const auto merge = [&](int rank, const peer::Pair<A>& pair, double(&mean_and_m2)[2]) {
      weights[rank].merge(mean_and_m2[0], mean_and_m2[1], pair.first, pair.second);
    };
    finish_range(receive_pairs<kPairsInFlight<A>>(wait_for_headers, merge, ResultWriter{result, int(C)}),
                 result, 2 * C + 2);
  }

  // Writes the sums of all ranks, added in rank order, to `result`, [2][C].
  __device__ __forceinline__ void receive_sums(A* result, int64_t C) const {
    const auto wait_for_headers = [&] {
      A unused_count[2];
      const int rank = int(threadIdx.x);
      return !__syncthreads_or(rank < exchange.world && !wait_for_header(rank, kNoCount, unused_count));
    };
    const auto add = [](int, const peer::Pair<A>& pair, double(&sums)[2]) {
      sums[0] += pair.first, sums[1] += pair.second;
    };
    finish_range(receive_pairs<kPairsInFlight<A>>(wait_for_headers, add, ResultWriter{result, int(C)}),
                 result, 2 * C);
  }
};

// Receives the moments of all ranks for a range of channels, and merges them. All threads of a block call.
template <class A>
__device__ __forceinline__ void receive_moments(const Exchange& exchange, const ChannelRange& range,
                                                A* result, int64_t C) {
  static_assert(peer::kMaxRanks < kThreads);
  __shared__ peer::FaultReport report;
  __shared__ MergeWeights weights[peer::kMaxRanks];
  __shared__ double counts[peer::kMaxRanks];
  MessageReceiver<A>(exchange, range, report).receive_moments(result, C, weights, counts);
}

// Receives the sums of all ranks for a range of channels, and adds them. All threads of a block call.
template <class A>
__device__ __forceinline__ void receive_sums(const Exchange& exchange, const ChannelRange& range, A* result,
                                             int64_t C) {
  __shared__ peer::FaultReport report;
  MessageReceiver<A>(exchange, range, report).receive_sums(result, C);
}

}  // namespace fastvit
