// Exchanges of statistics between CPU processes: the numbers of all ranks are merged in the order of ranks.
// `numbers` are this rank's moments, `[2C + 2]`, or its two sums of each channel, `[1, 2C]`. The tensor
// `exchange` is an ExchangeDescriptor.
#pragma once

#include "exchange_descriptor.h"

namespace fastvit {

// For an op with an argument `exchange`: sends `own_numbers`, this rank's moments or sums, to all peers,
// and waits at most exchange.timeout_ns for the messages of the peers. When they are complete, `result`
// gets the numbers of all ranks; after a fault it gets NaN. The FaultReport has the fault, or the ranks
// whose messages are missing. `result` may be `own_numbers`.
template <class A>
void exchange_numbers(const peer::Exchange& exchange, const A* own_numbers, A* result, int64_t channels);

// The same as an op, for numbers of an op without `exchange`.
Tensor exchange_merge(Tensor numbers, Tensor exchange);

// Waits exchange.timeout_ns more for missing messages; `result` is what exchange_merge or the op with
// `exchange` returned.
void exchange_wait(Tensor result, Tensor exchange);

// Abandons the exchange that follows or is not complete, and tells the peers.
void exchange_abandon(Tensor exchange);

// Merges this rank's numbers with messages that a collective has brought: `[world - 1][words]` int32, in
// the order of ranks without this one. A message is a Tag and the numbers. If a tag differs, the result is
// NaN and the FaultReport has the first such rank. fastvit/sync/collective.py calls the op.
Tensor merge_received(Tensor messages, Tensor numbers, Tensor exchange);

}  // namespace fastvit
