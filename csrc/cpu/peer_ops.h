// The ops of the peer protocol on the CPU; see peer.cpp. A `fault` is a number of peer.h's enum Fault.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace fastvit {

using torch::stable::Tensor;

// What a segment for `world` ranks takes, zeroed at first; `capacity` is in packets of 16 bytes.
int64_t peer_segment_bytes(int64_t world, int64_t capacity);

// Begins the next exchange: sends `numbers` to all peers, and does not wait.
void peer_push(Tensor segment, Tensor state, Tensor numbers, int64_t layer, int64_t step, int64_t kind);

// Waits up to `seconds` for the peers' numbers and puts them into `rows`, by rank, with one's own; `total`
// gets their sum, added in rank order. Returns a fault, and in `state` which peer it was about; kPending:
// call again.
int64_t peer_poll(Tensor segment, Tensor state, Tensor numbers, Tensor rows, std::optional<Tensor> total,
                  int64_t layer, int64_t step, int64_t kind, double seconds);

// peer_push and peer_poll.
int64_t peer_exchange(Tensor segment, Tensor state, Tensor numbers, Tensor rows, std::optional<Tensor> total,
                      int64_t layer, int64_t step, int64_t kind, double seconds);

// Leaves the exchange for good and lets the peers know.
void peer_give_up(Tensor segment, Tensor state);

// Waits up to `seconds` for all peers to be ready again after a give_up. Returns a fault as peer_poll does.
int64_t peer_rejoin(Tensor segment, Tensor state, double seconds);

}  // namespace fastvit
