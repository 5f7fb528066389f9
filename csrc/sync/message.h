// The message of a collective of torch.distributed: numbers, and tags by which ranks detect that they are in
// different exchanges. For host and device; fastvit/sync/collective.py calls the ops.
//
// A message has `capacity` numbers, of which the first n are used, and two numbers {layer, step} per tag; the
// rest is 0. All messages have the same size, also in different layers. Forward a message has one tag, and
// all_gather returns one message per rank. Backward it has one tag per rank, each rank writes its own, and
// all_reduce returns one message with the sums and all tags.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "../moments.h"
#include "handle.h"

namespace fastvit {
namespace message {

constexpr int64_t kTagNumbers = 2;

struct Shape {
  bool wide_numbers, wide_message;  // double, else float
  peer::Kind kind;
  int device;
  int64_t n, capacity, ranks, rank;
  int64_t layer, step;  // below 2^24, so a float holds them

  // The number of messages that the collective returns.
  FASTVIT_INLINE int64_t rows() const { return kind == peer::kMoments ? ranks : 1; }
  FASTVIT_INLINE int64_t tags() const { return kind == peer::kMoments ? 1 : ranks; }
  FASTVIT_INLINE int64_t width() const { return capacity + kTagNumbers * tags(); }

  // Calls f with A, the type of the numbers, and M, that of the message.
  template <class F>
  void call(const F& f) const {
    if (wide_numbers)
      f.template operator()<double, double>();
    else if (wide_message)
      f.template operator()<float, double>();
    else
      f.template operator()<float, float>();
  }
};

struct Packing : Shape {
  const void* numbers;
  void* message;

  template <class A, class M>
  FASTVIT_INLINE void write(int64_t i) const {
    const int64_t mine = capacity + (kind == peer::kMoments ? 0 : kTagNumbers * rank);
    M value = 0;
    if (i < n) value = M(static_cast<const A*>(numbers)[i]);
    if (i == mine) value = M(layer);
    if (i == mine + 1) value = M(step);
    static_cast<M*>(message)[i] = value;
  }
};

struct Merging : Shape {
  const void* numbers;   // this rank's
  const void* messages;  // [rows][width]
  void* result;          // moments, or two rows of sums: this rank's, and the group's
  peer::FaultReport* report;

  template <class M>
  FASTVIT_INLINE const M* row(int64_t r) const {
    return static_cast<const M*>(messages) + r * width();
  }
  template <class M>
  FASTVIT_INLINE peer::Tag tag_of(int64_t of) const {
    const M* const tag = row<M>(of / tags()) + capacity + of % tags() * kTagNumbers;
    return {uint32_t(tag[0]), uint32_t(tag[1]), 0, kind};
  }
  FASTVIT_INLINE peer::Tag own_tag() const { return {uint32_t(layer), uint32_t(step), 0, kind}; }
  template <class M>
  FASTVIT_INLINE bool fits(int64_t of) const {
    return same_exchange(tag_of<M>(of), own_tag());
  }

  FASTVIT_INLINE int64_t parts() const { return kind == peer::kMoments ? n / 2 : n; }
  // Writes part i of the result: a channel of moments or, as the last part, the count; a number of sums.
  template <class A, class M>
  FASTVIT_INLINE void write(int64_t i, bool good) const {
    A* const to = static_cast<A*>(result);
    if (kind == peer::kSums) {
      to[i] = static_cast<const A*>(numbers)[i];
      to[n + i] = good ? A(row<M>(0)[i]) : A(NAN);
      return;
    }
    const int64_t C = n / 2 - 1;
    double count = 0, mean = 0, m2 = 0;
    for (int64_t r = 0; r < ranks && good; ++r) {
      const M* const from = row<M>(r);
      const double theirs = load_count(from + 2 * C);
      if (i < C) Joining::of(count, theirs).join(mean, m2, from[i], from[C + i]);
      count += theirs;
    }
    if (i == C) {
      store_count(to + 2 * C, good ? count : double(NAN));
    } else {
      to[i] = good ? A(mean) : A(NAN);
      to[C + i] = good ? A(m2) : A(NAN);
    }
  }

  // The report for different tags.
  template <class M>
  FASTVIT_INLINE peer::FaultReport mismatch() const {
    peer::FaultReport report{peer::kMismatch, uint32_t(rank), 0, 0, own_tag(), {}, 0};
    for (int64_t of = ranks - 1; of >= 0; --of) {
      const peer::Tag theirs = tag_of<M>(of);
      if (!same_exchange(theirs, report.mine)) report.peer = uint32_t(of), report.theirs = theirs;
    }
    return report;
  }
};

inline Shape shape_of(const char* op, const Tensor& numbers, const peer::Handle& handle, bool wide_message) {
  peer::check_numbers(op, numbers);
  const int64_t n = numbers.size(numbers.dim() - 1);
  require(n <= handle.capacity && (wide_message || !peer::is_double(numbers)), op, "numbers", "is ",
          toString(numbers.scalar_type()), " ", fastvit::shape_of(numbers), "; at most ", handle.capacity,
          " numbers of ", wide_message ? "float64" : "float32", " expected");
  return {peer::is_double(numbers),
          wide_message,
          peer::kind_of(numbers),
          int(numbers.get_device_index()),
          n,
          handle.capacity,
          handle.world,
          handle.rank,
          handle.layer,
          handle.step};
}

}  // namespace message

// The ops that pack a message and merge messages, by a backend's pack(Packing) and merge(Merging). `numbers`
// are this rank's.
template <class Backend>
Tensor message_pack(Tensor numbers, Tensor fields) {
  const peer::Handle& handle = peer::handle_of("message_pack", fields);
  const message::Shape shape = message::shape_of("message_pack", numbers, handle, handle.wide);
  Tensor result = torch::stable::new_empty(numbers, {shape.width()},
                                           handle.wide ? ScalarType::Double : ScalarType::Float);
  Backend::pack(message::Packing{shape, numbers.data_ptr(), result.data_ptr()});
  return result;
}

// Merges the messages of all ranks. NaN, and a peer::FaultReport, unless all tags equal this rank's.
template <class Backend>
Tensor message_merge(Tensor messages, Tensor numbers, Tensor fields) {
  const char* const op = "message_merge";
  const peer::Handle& handle = peer::handle_of(op, fields);
  const message::Shape shape = message::shape_of(op, numbers, handle, peer::is_double(messages));
  require((messages.scalar_type() == ScalarType::Float || peer::is_double(messages)) &&
              messages.is_contiguous() && messages.numel() == shape.rows() * shape.width(),
          op, "messages", "is ", toString(messages.scalar_type()), " ", shape_of(messages), "; ",
          shape.rows() * shape.width(), " numbers expected, the messages of ", handle.world, " ranks");
  check_device(op, "messages", messages, numbers);
  check_memory(op, "messages", messages);
  Tensor result = shape.kind == peer::kMoments ? torch::stable::new_empty(numbers, {shape.n})
                                               : torch::stable::new_empty(numbers, {2, shape.n});
  Backend::merge(message::Merging{shape, numbers.data_ptr(), messages.data_ptr(), result.data_ptr(),
                                  reinterpret_cast<peer::FaultReport*>(handle.report)});
  return result;
}

struct CpuMessages {
  static void pack(const message::Packing& packing) {
    packing.call([&]<class A, class M>() {
      for (int64_t i = 0; i < packing.width(); ++i) packing.write<A, M>(i);
    });
  }
  static void merge(const message::Merging& merging) {
    merging.call([&]<class A, class M>() {
      bool good = true;
      for (int64_t rank = 0; rank < merging.ranks; ++rank) good &= merging.fits<M>(rank);
      for (int64_t i = 0; i < merging.parts(); ++i) merging.write<A, M>(i, good);
      if (!good) *merging.report = merging.mismatch<M>();
    });
  }
};

struct CudaMessages {  // csrc/cuda/message.cu
  static void pack(const message::Packing& packing);
  static void merge(const message::Merging& merging);
};

template <class Backend, class Library>
void implement_messages(Library& m) {
  m.impl("message_pack", TORCH_BOX(&message_pack<Backend>));
  m.impl("message_merge", TORCH_BOX(&message_merge<Backend>));
}

}  // namespace fastvit
