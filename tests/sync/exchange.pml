/* A model of the peer protocol of csrc/sync/protocol.h, for the model checker SPIN.
 * test_protocol_model.py defines the macros that are not defined here. Names are those of
 * csrc/cuda/exchange.cuh and, with CPU, of csrc/sync/cpu_exchange.cpp. A rank has an arena: memory to which
 * its peers, the other ranks, send messages.
 *
 * Kernels   The stream of a rank runs EXCHANGES kernels. A grid has RANGES blocks. Each block sends a tile
 *           (the pair of one channel; tile 0 also the header), and then waits for a range (the pairs of one
 *           channel of all ranks). A CPU's thread is a grid of one block.
 * Memory    A packet has two halves {word, epoch}; the store of a half is one step. The halves of a message
 *           are stored in any order; a CPU's fence orders the header after the payload. With WHOLE_PACKETS
 *           both halves of a packet are one step: fewer states. All ranks see the same order of steps.
 * Waiting   A wait is a guard that blocks, so SPIN reports a rank that waits forever as an invalid end state.
 * Faults    ABANDONING has a bit for each rank. Such a rank may time out in every wait, at any moment; on a
 *           CPU it may also be interrupted while it sends. On a CPU arena_failed is Python's Backend._failed.
 * Words     The words of a pair are the number n of the exchange. A rank that merges only words n has the
 *           result of its peers. The words of a header are the tag: layer and forward_index. REPLAYS is a
 *           rank that replays a captured graph, with forward_index 0. In exchange MISMATCH rank 0 is in
 *           another layer.
 * Epochs    begin after FIRST, and end at kLastEpoch instead of 2^32 - 1.
 * Mutants   ONE_SLOT, WRAP_TO_ONE, EPOCH_OF_CAPTURE, NO_EPOCH_CHECK, ONE_FLAG, FLAG_BEFORE_DATA, NO_FENCE,
 *           NO_TAG_CHECK, SILENT_ABANDON, NOT_STICKY and OWN_FAULT_ONLY are 0 in the protocol. One that is 1
 *           removes a rule of the protocol.
 */
#define kSlotsPerSender (2 - ONE_SLOT)
#define kLastEpoch 5
#define next_epoch(e) (e == kLastEpoch -> 2 - WRAP_TO_ONE : e + 1)
#define kFirstTurn CPU /* A CPU sends nothing to itself. */
#define HALVES_PER_MESSAGE (2 + 2 * RANGES) /* a header, and a pair for each channel */
#define inbox_slot(receiver, sender) \
  ((((receiver) * RANKS + (sender)) * kSlotsPerSender + epoch % kSlotsPerSender) * HALVES_PER_MESSAGE)
#define forward_index_of(rank) (rank == REPLAYS -> 0 : n)
#define layer_of(rank) (rank == 0 && n == MISMATCH -> 99 : n)
#define may_abandon(rank) (ABANDONING >> (rank) & 1)

typedef Half { byte word, epoch };
Half inbox[RANKS * RANKS * kSlotsPerSender * HALVES_PER_MESSAGE];
/* The words of the arenas, one for each rank. */
byte epoch_of[RANKS] = FIRST;
bool arena_failed[RANKS];
byte abandoned_epoch_of[RANKS * RANKS]; /* [receiver][rank that abandoned an exchange] */
/* The counters of a rank's grid, which every kernel leaves as zeros. */
byte tiles_finished[RANKS], ranges_ended[RANKS];
bool any_failed[RANKS];
/* What only the properties read, one for each rank. */
mtype = { kUnwritten, kNumbers, kNaN };
mtype result[RANKS * RANGES] = kUnwritten; /* the result of an exchange */
byte kernels_ended[RANKS];                 /* the count of kernels that have ended */
byte first_failed[RANKS] = 99;             /* the first exchange that failed */
byte reports[RANKS];                       /* the count of reports to the host */

#define may_store(i) (!WHOLE_PACKETS && unsent >> (i) & 1 && (!CPU || NO_FENCE || (i) > 1 || unsent < 4))
#define stored(i) inbox[inbox_slot(receiver, rank) + first_half + i]
#define word_of(half) (half > 1 -> n : (half -> forward_index_of(rank) : layer_of(rank)))

inline store_half(i) {
  atomic {
    unsent = unsent ^ (1 << i);
    assert(kernels_ended[receiver] >= n - kSlotsPerSender); /* The receiver has read what was in the slot. */
#if FLAG_BEFORE_DATA
    stored(i).epoch = epoch
  };
  atomic {
#endif
    stored(i).word = word_of(first_half + i);
    stored(i).epoch = epoch
  }
}

inline send() {
  for (turn : kFirstTurn .. RANKS - 1) {
    receiver = (rank + turn) % RANKS;
    unsent = (failed -> 0 : (tile -> 3 : 15)); /* a bit per half of the block's tile */
    do
    :: may_store(0) -> store_half(0)
    :: may_store(1) -> store_half(1)
    :: may_store(2) -> store_half(2)
    :: may_store(3) -> store_half(3)
    :: WHOLE_PACKETS && unsent & 3 -> atomic { store_half(0); store_half(1) }
    :: WHOLE_PACKETS && unsent > 3 && !(unsent & 3) -> atomic { store_half(2); store_half(3) }
    :: CPU && may_abandon(rank) && !failed -> failed = true; unsent = 0
    :: unsent == 0 -> break
    od
  };
  atomic { turn = 0; receiver = 0 }
}

#define has_arrived(half) (NO_EPOCH_CHECK -> inbox[half].epoch != 0 : inbox[half].epoch == epoch)
#define pair_arrived(half) (CPU || (has_arrived(half) && (ONE_FLAG || has_arrived(half + 1))))
/* A GPU reads the abandoned epoch of the rank whose packets are missing, a CPU those of all ranks. */
#define has_abandoned(peer) (abandoned_epoch_of[rank * RANKS + peer] != 0)
#define keep_waiting (!may_abandon(rank) && !has_abandoned(sender) && \
                      !(CPU && (has_abandoned(0) || has_abandoned(1) || has_abandoned(RANKS - 1))))
#define indexes_match(peer_index) \
  (peer_index == forward_index_of(rank) || peer_index == 0 || forward_index_of(rank) == 0)
#define tags_match(half) (inbox[half].word == layer_of(rank) && indexes_match(inbox[half + 1].word))

/* Waits for the header of the rank `sender`. */
inline wait_for_header(half) {
  atomic {
    if
    :: has_arrived(half) && has_arrived(half + 1) ->
      failed = failed || !(NO_TAG_CHECK || tags_match(half)) ||
               abandoned_epoch_of[rank * RANKS + sender] == epoch
    :: !keep_waiting -> failed = true
    fi
  }
}

/* Waits for a pair of the rank `sender`, and merges it. */
inline wait_for_pair(half) {
  atomic {
    if
    :: pair_arrived(half) -> assert(inbox[half].word == n && inbox[half + 1].word == n)
    :: !CPU && !keep_waiting -> failed = true
    fi
  }
}

/* A GPU has a thread for each header. Then a block merges the pairs of its range, in rank order. */
inline receive() {
  for (sender : 0 .. RANKS - 1) {
    if
    :: CPU && (failed || sender == rank)
    :: else -> wait_for_header(inbox_slot(rank, sender))
    fi
  };
  for (sender : 0 .. RANKS - 1) {
    if
    :: failed || (CPU && sender == rank)
    :: else -> wait_for_pair(inbox_slot(rank, sender) + 2 + 2 * range)
    fi
  };
  sender = 0
}

/* Ends a range, and in the last range the exchange. */
inline finish_range() {
  if
  :: failed && !had_failed ->
    atomic { reports[rank] = reports[rank] + !any_failed[rank]; any_failed[rank] = true };
    for (receiver : 0 .. RANKS - 1) {
      abandoned_epoch_of[receiver * RANKS + rank] = (receiver == rank || SILENT_ABANDON -> 0 : epoch)
    };
    receiver = 0
  :: else -> result[rank * RANGES + range] = (failed -> kUnwritten : kNumbers)
  fi;
  atomic {
    ranges_ended[rank]++;
    if
    :: ranges_ended[rank] == RANGES ->
      failed = failed || (any_failed[rank] && !OWN_FAULT_ONLY);
      any_failed[rank] = false; ranges_ended[rank] = 0;
      arena_failed[rank] = failed && !NOT_STICKY;
      epoch_of[rank] = (failed -> epoch_of[rank] : epoch);
      for (i : 0 .. RANGES - 1) { result[rank * RANGES + i] = (failed -> kNaN : result[rank * RANGES + i]) };
      check_properties();
      kernels_ended[rank] = n
    :: else
    fi;
    failed = false; had_failed = false; range = 0; epoch = 0; i = 0
  }
}

/* Checks the properties of exchange n when it has ended on a rank. */
inline check_properties() {
  first_failed[rank] = (failed && first_failed[rank] > n -> n : first_failed[rank]);
  for (i : 0 .. RANGES - 1) { /* After a fault of any range, now or earlier, the whole result is NaN. */
    assert(result[rank * RANGES + i] == (first_failed[rank] <= n -> kNaN : kNumbers));
    result[rank * RANGES + i] = kUnwritten
  };
  assert(reports[rank] == (first_failed[rank] <= n)); /* The host gets one report. */
  assert(failed || n != MISMATCH);                     /* A mismatch is a fault of every rank. */
  for (i : 0 .. RANKS - 1) { assert(failed || first_failed[i] >= n) }; /* No rank goes on after a fault. */
  /* There is no fault without a cause. A CPU that waits in n fails when a peer abandons n + 1. */
  assert(!failed || ABANDONING || n + CPU >= MISMATCH)
}

active [RANKS * RANGES] proctype Block() {
  byte rank, tile, first_half, n; /* `first_half`: where the tile begins in a message */
  byte epoch, turn, receiver, unsent, range, sender, i;
  bool failed, had_failed;
  atomic { rank = _pid / RANGES; tile = _pid % RANGES; first_half = (tile -> 2 + 2 * tile : 0) };
  for (n : 1 .. EXCHANGES) {
    kernels_ended[rank] == n - 1; /* the order of a stream */
    epoch = next_epoch((EPOCH_OF_CAPTURE && rank == REPLAYS -> FIRST : epoch_of[rank]));
    had_failed = arena_failed[rank]; failed = had_failed;
    if
    :: had_failed -> range = tile /* It neither sends nor waits. */
    :: else ->
      assert(first_failed[rank] > n); /* A fault is final. */
      send();
      /* receive_in_last_blocks */
      atomic { range = tiles_finished[rank]; tiles_finished[rank] = (range + 1) % RANGES };
      receive()
    fi;
    finish_range()
  }
}
