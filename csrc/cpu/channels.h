// What the O(C) part of the ops on the CPU has in common: parameters as numbers, in double, and tables.
#pragma once

#include <vector>

#include "../arguments.h"

namespace fastvit {

inline double number(const Channels& t, int64_t c, double absent) {
  if (!t.data) return absent;
  switch (t.dtype) {
    case ScalarType::Float:
      return static_cast<const float*>(t.data)[c];
    case ScalarType::Double:
      return static_cast<const double*>(t.data)[c];
    case ScalarType::Half:
      return float(static_cast<const c10::Half*>(t.data)[c]);
    default:
      return float(static_cast<const c10::BFloat16*>(t.data)[c]);
  }
}

inline void set_number(const Channels& t, int64_t c, double value) {
  switch (t.dtype) {
    case ScalarType::Float:
      static_cast<float*>(t.data)[c] = float(value);
      return;
    case ScalarType::Double:
      static_cast<double*>(t.data)[c] = value;
      return;
    case ScalarType::Half:
      static_cast<c10::Half*>(t.data)[c] = c10::Half(float(value));
      return;
    default:
      static_cast<c10::BFloat16*>(t.data)[c] = c10::BFloat16(float(value));
  }
}

template <class Args>
double gamma_of(const Args& args, int64_t c) {
  return effective_gamma(number(args.weight, c, 1), number(args.bias, c, 0),
                         gamma_floor<double>(args.in_place, args.dtype));
}

// float or double, as the accumulation type of `dtype`.
template <class F>
void with_accumulation(ScalarType dtype, const F& f) {
  dtype == ScalarType::Double ? f(double()) : f(float());
}

template <class A>
struct Tables {  // rows of C numbers in one allocation
  std::vector<A> numbers;
  int64_t C;
  Tables(int rows, int64_t C_) : numbers(rows * C_), C(C_) {}
  A* operator[](int row) { return numbers.data() + row * C; }
};

}  // namespace fastvit
