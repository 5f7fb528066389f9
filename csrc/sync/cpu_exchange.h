// Exchanges of statistics between CPU processes, the ranks: the numbers of all ranks are merged in the order
// of ranks. `numbers` are this rank's moments, `[2C + 2]` (mean[C], M2[C] and the count, stored as two
// numbers), or the sums of a backward, `[1, 2C]`: the first sums of all C channels, then the second sums. The
// tensor `exchange` is an ExchangeDescriptor: it describes the group of ranks and the exchange.
#pragma once

#include "exchange_descriptor.h"

namespace fastvit {

// For an op with an argument `exchange`: sends `own_numbers`, this rank's moments or sums, to all peers (the
// other ranks), and waits at most exchange.timeout_ns for the messages of the peers. When all messages have
// arrived, `result` gets the merged numbers of all ranks; after a fault it gets NaN. The FaultReport has the
// fault, or the ranks whose messages are missing. `result` may be `own_numbers`. A: float or double.
template <class A>
void exchange_numbers(const peer::Exchange& exchange, const A* own_numbers, A* result, int64_t channels);

// exchange_numbers as an op of its own: for numbers that came from an op without the argument `exchange`.
// Returns the merged moments, `[2C + 2]`, or two rows of sums, `[2, 2C]`: this rank's, then the total.
Tensor exchange_merge(Tensor numbers, Tensor exchange);

// Waits for missing messages, for at most the timeout_ns of `exchange`. Completes `result`, the tensor that
// exchange_merge or the op with the argument `exchange` returned while messages were missing.
void exchange_wait(Tensor result, Tensor exchange);

// Abandons (gives up) the current exchange if it is not complete, else the next one, and tells the peers,
// whose exchange fails then.
void exchange_abandon(Tensor exchange);

// Merges this rank's numbers with the messages that a collective of torch.distributed has brought: int32, a
// row for each other rank in the order of ranks. A row begins with a message: a Tag, by which ranks see that
// they are in the same exchange, and the numbers. If a tag differs from this rank's, the merged numbers are
// NaN, and the FaultReport has the first such rank. fastvit/sync/collective.py calls the op.
Tensor merge_received(Tensor messages, Tensor numbers, Tensor exchange);

}  // namespace fastvit
