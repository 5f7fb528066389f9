// Exchanges between processes of one host, on the CPU; see cpu_peer.cpp.
#pragma once

#include "handle.h"

namespace fastvit {

// Sends this rank's numbers, `own`, and waits a slice of time for the others'; see await.
template <class A>
void share(const peer::Exchange& exchange, const A* own, A* result, int64_t channels);

// Waits a slice of time for what an exchange awaits. `result` gets the ranks' numbers merged, moments over
// `own`; NaN where it failed, and a report, which also says whose numbers
// are not there yet.
template <class A>
void await(const peer::Exchange& exchange, const A* own, A* result, int64_t channels);

// The exchange of numbers that no other op has at hand: see fastvit/sync/transport.py.
Tensor peer_share(Tensor numbers, Tensor exchange);

// Another slice of an exchange that an op began; `result` is what that returned.
void peer_wait(Tensor result, Tensor exchange);

// Leaves the exchange for good and lets the peers know.
void peer_give_up(Tensor exchange);

}  // namespace fastvit
