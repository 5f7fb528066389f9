// What the O(C) part of the ops on the CPU has in common: parameters as numbers, in double, and tables.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <vector>

#include "../arguments.h"

namespace fastvit {

inline double load_channel(const Channels& t, int64_t c, double absent) {
  if (!t.data) return absent;
  return dispatch_dtype<c10::Half, c10::BFloat16>(
      t.dtype, [&]<class T>() { return double(Accumulation<T>(static_cast<const T*>(t.data)[c])); });
}

inline void store_channel(const Channels& t, int64_t c, double value) {
  dispatch_dtype<c10::Half, c10::BFloat16>(
      t.dtype, [&]<class T>() { static_cast<T*>(t.data)[c] = T(Accumulation<T>(value)); });
}

template <class Args>
double gamma_of(const Args& args, int64_t c) {
  return effective_gamma(load_channel(args.weight, c, 1), load_channel(args.bias, c, 0),
                         gamma_floor<double>(args.in_place, args.dtype));
}

template <class A>
struct Tables {  // rows of C numbers in one allocation
  std::vector<A> numbers;
  int64_t C;
  Tables(int rows, int64_t C_) : numbers(rows * C_), C(C_) {}
  A* operator[](int row) { return numbers.data() + row * C; }
};

}  // namespace fastvit
