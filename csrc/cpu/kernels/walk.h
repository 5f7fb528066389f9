// Walks activations of any strides span by span, and selects a kernel by dtype and activation.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../../activation.h"
#include "../kernels.h"
#include "vector.h"

namespace fastvit {
namespace FASTVIT_CAPABILITY {

// One operand. A span with unit step is read and written in place. Any other is copied to a buffer on the
// stack and back.
template <class T>
struct Activations {
  T* data;
  Strides strides;
  int64_t step;  // between elements of a span
  const Layout* layout;

  Activations(const void* pointer, const Layout& layout_, int operand)
      : data(static_cast<T*>(const_cast<void*>(pointer))),
        strides(layout_.strides[operand]),
        step(layout_.rows ? strides.channel : strides.inner),
        layout(&layout_) {}

  int64_t outer(int64_t n) const {
    if (layout->outer_dims == 1) return n * strides.outer[0];
    int64_t offset = 0;
    for (int d = layout->outer_dims - 1; d >= 0; --d) {
      offset += n % layout->outer_size[d] * strides.outer[d];
      n /= layout->outer_size[d];
    }
    return offset;
  }
  T* at(int64_t outer, int64_t c, int64_t s) const {
    return data + (outer + c * strides.channel + s * strides.inner);
  }
  bool lies_in_place(int64_t n) const { return step == 1 || n == 1; }
  const T* read(T* span, int64_t n, T* buffer) const {
    if (lies_in_place(n)) return span;
    for (int64_t i = 0; i < n; ++i) buffer[i] = span[i * step];
    return buffer;
  }
  T* target(T* span, int64_t n, T* buffer) const { return lies_in_place(n) ? span : buffer; }
  void written(T* span, int64_t n, const T* buffer) const {
    if (lies_in_place(n)) return;
    for (int64_t i = 0; i < n; ++i) span[i * step] = buffer[i];
  }
};

// A per-channel constant along a span: one number for a plane, a vector of the table for a row.
template <class A, bool kRows>
struct PerChannel {
  const A* table;
  Vector<A> value;
  PerChannel(const void* table_, int64_t c)
      : table(static_cast<const A*>(table_) + c), value(Vector<A>{} + (kRows ? A(0) : *table)) {}
  template <class Place>
  FASTVIT_INLINE Vector<A> at(Place place) const {
    return kRows ? place.load(table) : value;
  }
};

// f(n, c, s, length) for every span piece of positions [begin, end), in the order of memory. Planes: a
// position is (n, c, piece). Rows: (n, piece), with c the piece's first channel.
inline int64_t positions(const Layout& layout, const Partition& partition) {
  return layout.N * partition.pieces * (layout.rows ? 1 : layout.C);
}
template <class F>
FASTVIT_INLINE void for_each_piece(const Layout& layout, const Partition& partition, int64_t begin,
                                   int64_t end, const F& f) {
  const int64_t span = layout.rows ? layout.C : layout.S;
  const int64_t middle = layout.rows ? 1 : layout.C;
  int64_t piece = begin % partition.pieces, m = begin / partition.pieces % middle,
          n = begin / partition.pieces / middle;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t at = piece * partition.piece;
    const int64_t length = span - at < partition.piece ? span - at : partition.piece;
    f(n, layout.rows ? at : m, layout.rows ? 0 : at, length);
    if (++piece == partition.pieces) {
      piece = 0;
      if (++m == middle) m = 0, ++n;
    }
  }
}

// f(slice, first step, last step, first channel, last channel) for every task of a reduction.
template <class F>
void for_each_task(const Layout& layout, const Partition& partition, const F& f) {
  torch::stable::parallel_for(0, partition.slices * partition.blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t slice = task / partition.blocks, block = task % partition.blocks;
      f(slice, partition.steps * slice / partition.slices, partition.steps * (slice + 1) / partition.slices,
        layout.C * block / partition.blocks, layout.C * (block + 1) / partition.blocks);
    }
  });
}

constexpr int64_t kGrain = 32768;  // fewest elements that are worth a thread

inline int64_t grain_of(int64_t piece) {
  return piece > 0 && kGrain > piece ? kGrain / piece : 1;
}

template <class T>
struct AccumulationOf {
  using type = float;
};
template <>
struct AccumulationOf<double> {
  using type = double;
};

// Calls Kernel<T, accumulation type>::run(args) for the dtype in args.
template <template <class, class> class Kernel, class Args>
void dispatch_dtype(const Args& args) {
  switch (args.dtype) {
    case ScalarType::Float:
      return Kernel<float, float>::run(args);
    case ScalarType::Double:
      return Kernel<double, double>::run(args);
    case ScalarType::BFloat16:
      return Kernel<BFloat16, float>::run(args);
    default:
      return Kernel<Half, float>::run(args);
  }
}

// Calls f.template operator()<activation>().
template <class F>
FASTVIT_INLINE void dispatch_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::identity:
      return f.template operator()<Activation::identity>();
    case Activation::relu:
      return f.template operator()<Activation::relu>();
    case Activation::relu6:
      return f.template operator()<Activation::relu6>();
    case Activation::leaky_relu:
      return f.template operator()<Activation::leaky_relu>();
    case Activation::elu:
      return f.template operator()<Activation::elu>();
    case Activation::gelu:
      return f.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return f.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return f.template operator()<Activation::silu>();
    case Activation::hardswish:
      return f.template operator()<Activation::hardswish>();
  }
}

// Runs the Kernel<T, A, rows, in place, residual, activation> for the args of a backward op.
template <template <class, class, bool, bool, bool, Activation> class Kernel, class T, class A, class Args>
void dispatch_gradient(const Args& args) {
  dispatch_activation(args.activation, [&]<Activation kActivation>() {
    const auto walk = [&]<bool kRows>() {
      if constexpr (is_invertible(kActivation))
        if (args.in_place) return Kernel<T, A, kRows, true, false, kActivation>{args}.run();
      if (args.z)
        Kernel<T, A, kRows, false, true, kActivation>{args}.run();
      else
        Kernel<T, A, kRows, false, false, kActivation>{args}.run();
    };
    args.layout.rows ? walk.template operator()<true>() : walk.template operator()<false>();
  });
}

}  // namespace FASTVIT_CAPABILITY
}  // namespace fastvit
