/* The peer protocol of csrc/sync/protocol.h, for the model checker SPIN. tests/test_exchange_model.py defines
 * the macros that are not defined here. Names are those of csrc/cuda/exchange.cuh and, with CPU, of
 * csrc/sync/cpu_exchange.cpp.
 *
 * Kernels   The stream of a rank runs EXCHANGES kernels. A grid has PARTS blocks. Each block pushes a tile
 *           (the pair of one channel; tile 0 also the header), and then waits for a part (all ranks' pairs of
 *           one channel). A CPU's thread is a grid of one block.
 * Memory    The store of a half of a packet, {word, epoch}, is a step. The halves of a message are stored in
 *           any order; a CPU's fence orders the header after the payload. WHOLE_PACKETS makes fewer states:
 *           both halves of a packet are one step. All ranks see the steps in one order.
 * Waiting   A poll is a guard that blocks, so SPIN reports a rank that waits forever as an invalid end state.
 * Faults    GIVING_UP has a bit per rank. Such a rank may time out in every wait, at any moment; on a CPU it
 *           may also be interrupted during its push. A CPU's `abandoned` is Python's Backend._failed.
 * Words     The words of a pair are the number n of the exchange. A rank that merges only words n has the
 *           result of its peers. The words of a header are the tag, layer and step. REPLAYS is a rank that
 *           replays a captured graph, with step 0. In exchange MISMATCH rank 0 is in another layer.
 * Epochs    follow FIRST, and end at kLastEpoch instead of 2^32 - 1.
 * Mutants   ONE_SLOT, WRAP_TO_ONE, EPOCH_OF_CAPTURE, NO_EPOCH_CHECK, ONE_FLAG, FLAG_BEFORE_DATA, NO_FENCE,
 *           NO_TAG_CHECK, SILENT_GIVE_UP, NOT_STICKY and OWN_FAULT_ONLY are 0 in the protocol. One that is 1
 *           removes a rule of the protocol.
 */
#define kSlots (2 - ONE_SLOT)
#define kLastEpoch 5
#define next_epoch(e) (e == kLastEpoch -> 2 - WRAP_TO_ONE : e + 1)
#define kFirstTurn CPU         /* A CPU sends nothing to itself. */
#define HALVES (2 + 2 * PARTS) /* of a message: a header, and a pair per channel */
#define message(receiver, sender) ((((receiver) * RANKS + (sender)) * kSlots + epoch % kSlots) * HALVES)
#define step_of(rank) (rank == REPLAYS -> 0 : n)
#define layer_of(rank) (rank == 0 && n == MISMATCH -> 99 : n)
#define may_give_up(rank) (GIVING_UP >> (rank) & 1)

typedef Half { byte word, epoch };
Half inbox[RANKS * RANKS * kSlots * HALVES];
/* Arena, by rank. */
byte epoch_of[RANKS] = FIRST;
bool abandoned[RANKS];
byte gave_up[RANKS * RANKS]; /* [receiver][rank that gave up] */
/* The words of a rank's grid, which every kernel leaves as zeros. */
byte finished[RANKS], ended[RANKS];
bool any[RANKS];
/* For the properties alone, by rank. */
mtype = { kUnwritten, kNumbers, kNaN };
mtype row[RANKS * PARTS] = kUnwritten; /* the result of an exchange */
byte kernels[RANKS];                   /* the count of kernels that ended */
byte failed_at[RANKS] = 99;            /* the first exchange that failed */
byte reports[RANKS];                   /* the count of reports to the host */

#define may_store(i) (!WHOLE_PACKETS && unsent >> (i) & 1 && (!CPU || NO_FENCE || (i) > 1 || unsent < 4))
#define stored(i) inbox[message(to, rank) + first + i]
#define word_of(half) (half > 1 -> n : (half -> step_of(rank) : layer_of(rank)))

inline store(i) {
  atomic {
    unsent = unsent ^ (1 << i);
    assert(kernels[to] >= n - kSlots); /* The receiver has read what was in the slot. */
#if FLAG_BEFORE_DATA
    stored(i).epoch = epoch
  };
  atomic {
#endif
    stored(i).word = word_of(first + i);
    stored(i).epoch = epoch
  }
}

inline push() {
  for (turn : kFirstTurn .. RANKS - 1) {
    to = (rank + turn) % RANKS;
    unsent = (failed -> 0 : (tile -> 3 : 15)); /* a bit per half of the block's tile */
    do
    :: may_store(0) -> store(0)
    :: may_store(1) -> store(1)
    :: may_store(2) -> store(2)
    :: may_store(3) -> store(3)
    :: WHOLE_PACKETS && unsent & 3 -> atomic { store(0); store(1) }
    :: WHOLE_PACKETS && unsent > 3 && !(unsent & 3) -> atomic { store(2); store(3) }
    :: CPU && may_give_up(rank) && !failed -> failed = true; unsent = 0
    :: unsent == 0 -> break
    od
  };
  atomic { turn = 0; to = 0 }
}

#define arrived(half) (NO_EPOCH_CHECK -> inbox[half].epoch != 0 : inbox[half].epoch == epoch)
#define pair_arrived(half) (CPU || (arrived(half) && (ONE_FLAG || arrived(half + 1))))
/* keep_waiting. A GPU reads the flag of the rank whose packets are missing, a CPU those of all ranks. */
#define flag_of(peer) (gave_up[rank * RANKS + peer] != 0)
#define keep_waiting (!may_give_up(rank) && !flag_of(from) && \
                      !(CPU && (flag_of(0) || flag_of(1) || flag_of(RANKS - 1))))
/* same_exchange */
#define same_step(theirs) (theirs == step_of(rank) || theirs == 0 || step_of(rank) == 0)
#define same_tag(half) (inbox[half].word == layer_of(rank) && same_step(inbox[half + 1].word))

/* Waits for the header of the rank `from`. */
inline header(half) {
  atomic {
    if
    :: arrived(half) && arrived(half + 1) ->
      failed = failed || !(NO_TAG_CHECK || same_tag(half)) || gave_up[rank * RANKS + from] == epoch
    :: !keep_waiting -> failed = true
    fi
  }
}

/* Waits for a pair of the rank `from`, and merges it. */
inline pair(half) {
  atomic {
    if
    :: pair_arrived(half) -> assert(inbox[half].word == n && inbox[half + 1].word == n)
    :: !CPU && !keep_waiting -> failed = true
    fi
  }
}

/* A GPU has a thread for each header. Then a block merges the pairs of its part, in rank order. */
inline wait() {
  for (from : 0 .. RANKS - 1) {
    if
    :: CPU && (failed || from == rank)
    :: else -> header(message(rank, from))
    fi
  };
  for (from : 0 .. RANKS - 1) {
    if
    :: failed || (CPU && from == rank)
    :: else -> pair(message(rank, from) + 2 + 2 * part)
    fi
  };
  from = 0
}

/* The end of a part, and in the last part to end, of the exchange. */
inline end() {
  if
  :: failed && !was_abandoned ->
    atomic { reports[rank] = reports[rank] + !any[rank]; any[rank] = true };
    for (to : 0 .. RANKS - 1) {
      gave_up[to * RANKS + rank] = (to == rank || SILENT_GIVE_UP -> 0 : epoch)
    };
    to = 0
  :: else -> row[rank * PARTS + part] = (failed -> kUnwritten : kNumbers)
  fi;
  atomic {
    ended[rank]++;
    if
    :: ended[rank] == PARTS ->
      failed = failed || (any[rank] && !OWN_FAULT_ONLY);
      any[rank] = false; ended[rank] = 0;
      abandoned[rank] = failed && !NOT_STICKY;
      epoch_of[rank] = (failed -> epoch_of[rank] : epoch);
      for (i : 0 .. PARTS - 1) { row[rank * PARTS + i] = (failed -> kNaN : row[rank * PARTS + i]) };
      check();
      kernels[rank] = n
    :: else
    fi;
    failed = false; was_abandoned = false; part = 0; epoch = 0; i = 0
  }
}

/* The properties of exchange n, when it has ended on a rank. */
inline check() {
  failed_at[rank] = (failed && failed_at[rank] > n -> n : failed_at[rank]);
  for (i : 0 .. PARTS - 1) { /* After a fault of any part, now or earlier, the whole row is NaN. */
    assert(row[rank * PARTS + i] == (failed_at[rank] <= n -> kNaN : kNumbers));
    row[rank * PARTS + i] = kUnwritten
  };
  assert(reports[rank] == (failed_at[rank] <= n));              /* The host gets one report. */
  assert(failed || n != MISMATCH);                              /* A mismatch is a fault of every rank. */
  for (i : 0 .. RANKS - 1) { assert(failed || failed_at[i] >= n) }; /* No rank goes on after a fault. */
  /* There is no fault without a cause. A CPU that waits in n fails when a peer gives up n + 1. */
  assert(!failed || GIVING_UP || n + CPU >= MISMATCH)
}

active [RANKS * PARTS] proctype Block() {
  byte rank, tile, first, n; /* `first` is the first half of the tile in a message. */
  byte epoch, turn, to, unsent, part, from, i;
  bool failed, was_abandoned;
  atomic { rank = _pid / PARTS; tile = _pid % PARTS; first = (tile -> 2 + 2 * tile : 0) };
  for (n : 1 .. EXCHANGES) {
    kernels[rank] == n - 1; /* the order of a stream */
    epoch = next_epoch((EPOCH_OF_CAPTURE && rank == REPLAYS -> FIRST : epoch_of[rank]));
    was_abandoned = abandoned[rank]; failed = was_abandoned;
    if
    :: was_abandoned -> part = tile /* It neither sends nor waits. */
    :: else ->
      assert(failed_at[rank] > n); /* A fault is final. */
      push();
      atomic { part = finished[rank]; finished[rank] = (part + 1) % PARTS }; /* wait_in_last_blocks */
      wait()
    fi;
    end()
  }
}
