// Exchanges between processes of one host, on the CPU; see cpu_exchange.cpp.
#pragma once

#include "exchange_descriptor.h"

namespace fastvit {

// Sends this rank's numbers, `own`, and waits one slice of time for the others'. When they are complete,
// `result` gets the merged numbers (moments overwrite `own`); after a fault NaN. The report has the fault, or
// the missing ranks.
template <class A>
void exchange_numbers(const peer::Exchange& exchange, const A* own, A* result, int64_t channels);

// Exchanges numbers that an op without `exchange` has computed; see fastvit/sync/transport.py.
Tensor exchange_merge(Tensor numbers, Tensor exchange);

// Waits another slice of time for an exchange; `result` is the result of its op.
void exchange_wait(Tensor result, Tensor exchange);

// Gives up the exchange and notifies the peers.
void exchange_abandon(Tensor exchange);

// Merges this rank's numbers with those that the others have sent, `[world - 1][words]` int32, by rank: a
// Tag, then the numbers. NaN, and a report, where a tag differs. fastvit/sync/collective.py calls it.
Tensor merge_received(Tensor messages, Tensor numbers, Tensor exchange);

}  // namespace fastvit
