// Exchanges by kernels of their own, for numbers that no other kernel sends or awaits (traced code), and what
// follows an exchange that failed. `exchange` is as in ../exchange.h, `arena` this rank's.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

namespace fastvit {

using torch::stable::Tensor;

// Begins the next exchange: sends `numbers`, moments or sums as `kind` says, to all ranks; does not wait.
void exchange_push(Tensor exchange, Tensor numbers, int64_t kind);

// The ranks' numbers, `(world, numbers)` in rank order, or with `add` their sum, added in that order. All are
// NaN if the exchange has failed.
Tensor exchange_poll(Tensor exchange, Tensor numbers, int64_t kind, bool add);

// Ends an exchange that was pushed and will not be polled, and lets the peers know.
void exchange_give_up(Tensor exchange, Tensor arena);

// After a fault, when no kernel of any rank is under way: the next exchange is the one after `epoch`.
void exchange_rejoin(Tensor arena, int64_t epoch, int64_t generation);

template <class Library>
void implement_exchange(Library& m) {
  m.impl("exchange_push", TORCH_BOX(&exchange_push));
  m.impl("exchange_poll", TORCH_BOX(&exchange_poll));
  m.impl("exchange_give_up", TORCH_BOX(&exchange_give_up));
  m.impl("exchange_rejoin", TORCH_BOX(&exchange_rejoin));
}

}  // namespace fastvit
