// What ranks exchange by one collective of torch.distributed: numbers, and tags by which they see whether all
// are in the same exchange. Written once for host and device; who calls the ops stands in
// fastvit/statistics/collective.py.
//
// A message is `capacity` numbers, of which the first n count, and two numbers {layer, step} per tag; the
// rest is 0. All ranks' messages are of one size, whatever layer each is in. Forward it has one tag, and
// all_gather leaves one message per rank. Backward it has one per rank, each writes its own, and all_reduce
// leaves one message with the sums and all tags.
#pragma once

#include <cmath>

#include "checks.h"
#include "peer.h"

namespace fastvit::message {

constexpr int64_t kTagNumbers = 2;

struct Kinds {                      // of what is packed or unpacked
  bool wide_numbers, wide_message;  // double, else float
  int device;

  // f with A, the type of the numbers, and M, that of the message.
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

struct Packing {
  Kinds kinds;
  const void* numbers;
  void* message;
  int64_t n, capacity, tags, tag;  // which of the tags to write
  int64_t layer, step;             // below 2^24, so a float holds them

  FASTVIT_INLINE int64_t size() const { return capacity + kTagNumbers * tags; }
  template <class A, class M>
  FASTVIT_INLINE void write(int64_t i) const {
    const int64_t mine = capacity + kTagNumbers * tag;
    M value = 0;
    if (i < n) value = M(static_cast<const A*>(numbers)[i]);
    if (i == mine) value = M(layer);
    if (i == mine + 1) value = M(step);
    static_cast<M*>(message)[i] = value;
  }
};

struct Unpacking {
  Kinds kinds;
  const void* messages;  // [rows][capacity + 2 * tags]
  void* result;          // [rows][n]
  int64_t n, rows, capacity, tags;
  int64_t rank, layer, step;
  peer::Report* report;

  FASTVIT_INLINE int64_t width() const { return capacity + kTagNumbers * tags; }
  FASTVIT_INLINE int64_t ranks() const { return rows * tags; }
  template <class M>
  FASTVIT_INLINE peer::Tag tag_of(int64_t of) const {
    const M* const tag =
        static_cast<const M*>(messages) + of / tags * width() + capacity + of % tags * kTagNumbers;
    return {uint32_t(tag[0]), uint32_t(tag[1]), 0, kind()};
  }
  FASTVIT_INLINE uint32_t kind() const { return rows == 1 ? peer::kSums : peer::kMoments; }
  FASTVIT_INLINE peer::Tag own_tag() const { return {uint32_t(layer), uint32_t(step), 0, kind()}; }
  template <class M>
  FASTVIT_INLINE bool fits(int64_t of) const {
    return same_exchange(tag_of<M>(of), own_tag());
  }
  template <class A, class M>
  FASTVIT_INLINE void write(int64_t i, bool good) const {
    const M* const from = static_cast<const M*>(messages);
    static_cast<A*>(result)[i] = good ? A(from[i / n * width() + i % n]) : A(NAN);
  }

  // What to tell the host when tags differ; in place of an epoch the largest step, behind which all go on.
  template <class M>
  FASTVIT_INLINE peer::Report mismatch() const {
    peer::Report report{peer::kMismatch, uint32_t(rank), 0, 0, own_tag(), {}};
    for (int64_t of = ranks() - 1; of >= 0; --of) {
      const peer::Tag theirs = tag_of<M>(of);
      if (theirs.step > report.epoch) report.epoch = theirs.step;
      if (!same_exchange(theirs, report.mine)) report.peer = uint32_t(of), report.theirs = theirs;
    }
    return report;
  }
};

inline bool is_wide(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double;
}

inline void check_row(const char* op, const char* argument, const Tensor& t) {
  require((t.scalar_type() == ScalarType::Float || is_wide(t)) && t.dim() == 1 && t.is_contiguous(), op,
          argument, "is ", toString(t.scalar_type()), " ", shape_of(t),
          "; one contiguous row of float32 or float64 expected");
  check_memory(op, argument, t);
}

}  // namespace fastvit::message
