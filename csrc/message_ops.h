// The ops that make a message and take it apart, for any backend, whose pack(Packing) and unpack(Unpacking)
// do the work.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "message.h"

namespace fastvit {

// A message of `numbers`, and the tag {layer, step} as number `tag` of `tags`; float64 if `wide`.
template <class Backend>
Tensor message_pack(Tensor numbers, int64_t layer, int64_t step, int64_t tag, int64_t tags, int64_t capacity,
                    bool wide) {
  const char* const op = "message_pack";
  message::check_row(op, "numbers", numbers);
  require(numbers.numel() <= capacity && (wide || !message::is_wide(numbers)), op, "numbers", "is ",
          toString(numbers.scalar_type()), " ", shape_of(numbers), "; at most ", capacity, " numbers of ",
          wide ? "float64" : "float32", " expected");
  require(tag >= 0 && tag < tags && tags <= kMostElements, op, "tag", "is ", tag, " of ", tags,
          "; one of at most 2^48 expected");
  require(capacity <= kMostElements, op, "capacity", "is ", capacity, "; at most 2^48 expected");
  Tensor result = torch::stable::new_empty(numbers, {capacity + message::kTagNumbers * tags},
                                           wide ? ScalarType::Double : ScalarType::Float);
  Backend::pack(message::Packing{{message::is_wide(numbers), wide, int(numbers.get_device_index())},
                                 numbers.data_ptr(),
                                 result.data_ptr(),
                                 numbers.numel(),
                                 capacity,
                                 tags,
                                 tag,
                                 layer,
                                 step});
  return result;
}

// The numbers of `messages`, which `ranks` ranks have made: `(ranks, n)` if they were gathered, `(n,)` if
// they were added up; like `numbers`, those of this rank. NaN, and a peer::Report in `report`, if not all
// ranks' tags are {layer, step}.
template <class Backend>
Tensor message_unpack(Tensor messages, Tensor numbers, int64_t layer, int64_t step, int64_t rank,
                      int64_t ranks, bool gathered, Tensor report) {
  const char* const op = "message_unpack";
  message::check_row(op, "numbers", numbers);
  message::check_row(op, "messages", messages);
  require(rank >= 0 && rank < ranks && ranks <= kMostElements, op, "rank", "is ", rank, " of ", ranks,
          "; one of at most 2^48 expected");
  require(report.is_cpu() && report.is_contiguous() && report.scalar_type() == ScalarType::Int &&
              report.numel() * sizeof(int32_t) == sizeof(peer::Report),
          op, "report", "is not ", sizeof(peer::Report) / sizeof(int32_t), " int32 on the CPU");
  check_memory(op, "report", report);
  const int64_t rows = gathered ? ranks : 1, tags = gathered ? 1 : ranks, n = numbers.numel();
  const int64_t capacity = messages.numel() / rows - message::kTagNumbers * tags;
  require(messages.numel() % rows == 0 && n <= capacity &&
              (message::is_wide(messages) || !message::is_wide(numbers)),
          op, "messages", "is ", toString(messages.scalar_type()), " ", shape_of(messages),
          ", which are no messages of ", ranks, " ranks with ", n, " numbers each");
  check_device(op, "messages", messages, numbers);
  Tensor result =
      gathered ? torch::stable::new_empty(numbers, {rows, n}) : torch::stable::new_empty(numbers, {n});
  Backend::unpack(message::Unpacking{
      {message::is_wide(numbers), message::is_wide(messages), int(numbers.get_device_index())},
      messages.data_ptr(),
      result.data_ptr(),
      n,
      rows,
      capacity,
      tags,
      rank,
      layer,
      step,
      static_cast<peer::Report*>(report.data_ptr())});
  return result;
}

template <class Backend, class Library>
void implement_messages(Library& m) {
  m.impl("message_pack", TORCH_BOX(&message_pack<Backend>));
  m.impl("message_unpack", TORCH_BOX(&message_unpack<Backend>));
}

}  // namespace fastvit
