// Exchanges between processes of one host, on the CPU; see cpu_peer.cpp.
#pragma once

#include "handle.h"

namespace fastvit {

// Sends this rank's numbers, `own`, and waits one slice of time for the others'. When they are complete,
// `result` gets the merged numbers (moments overwrite `own`); after a fault NaN. The report has the fault, or
// the missing ranks.
template <class A>
void share(const peer::Exchange& exchange, const A* own, A* result, int64_t channels);

// Exchanges numbers that an op without `exchange` has computed; see fastvit/sync/transport.py.
Tensor peer_share(Tensor numbers, Tensor exchange);

// Waits another slice of time for an exchange; `result` is the result of its op.
void peer_wait(Tensor result, Tensor exchange);

// Gives up the exchange and notifies the peers.
void peer_give_up(Tensor exchange);

// Merges this rank's numbers with those that the others have sent, `[world - 1][words]` int32, by rank: a
// Tag, then the numbers. NaN, and a report, where a tag differs. fastvit/sync/collective.py calls it.
Tensor direct_merge(Tensor messages, Tensor numbers, Tensor exchange);

}  // namespace fastvit
