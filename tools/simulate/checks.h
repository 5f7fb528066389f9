// What all cases of the driver share: comparisons, their tolerances, names of types.
#pragma once

#include <cstdio>

#include "tensors.h"

namespace fastvit::simulate {

inline const char* name_of(ScalarType dtype) {
  return dtype == ScalarType::Double  ? "fp64"
         : dtype == ScalarType::Float ? "fp32"
         : dtype == ScalarType::Half  ? "fp16"
                                      : "bf16";
}
inline std::string name_of(const Shape& shape) {
  constexpr const char* walks[] = {"planes", "rows", "cropped"};
  return std::string(walks[int(shape.walk)]) + " " + std::to_string(shape.N) + "x" + std::to_string(shape.C) +
         "x" + std::to_string(shape.S);
}
inline ScalarType accumulated(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
inline Shape row(int64_t numbers) {
  return {Walk::planes, 1, numbers, 1};
}

class Checks {
 public:
  int made = 0, failed = 0;
  std::string where;

  // |actual - expected| <= tolerance * (|expected| + scale), everywhere.
  void close(const std::string& what, const Values& actual, const Values& expected, double tolerance,
             double scale = 1) {
    double worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double error = std::fabs(actual[i] - expected[i]) / (std::fabs(expected[i]) + scale);
      worst = error >= worst || std::isnan(error) ? error : worst;
      if (std::isnan(error)) break;
    }
    report(what, worst <= tolerance, worst, tolerance);
  }
  void same(const std::string& what, Array& array, const Values& before) {
    report(what + " unchanged", array.read() == before, 0, 0);
  }
  void report(const std::string& what, bool passed, double error, double tolerance) {
    ++made;
    failed += !passed;
    std::fprintf(stderr, "%s %s: %s: %.2g of %.2g\n", passed ? "ok  " : "FAIL", where.c_str(), what.c_str(),
                 error, tolerance);
  }
};

constexpr double kEps = 1e-5, kMomentum = 0.1;

inline double parameter(Activation a) {
  return a == Activation::elu ? 1.0 : 0.01;
}
// Half a unit in the last place of results, twice; of float arithmetic some roundings of 2^-24 in a row.
inline double tolerance_of(ScalarType dtype) {
  return dtype == ScalarType::Double     ? 1e-9
         : dtype == ScalarType::Float    ? 4e-6
         : dtype == ScalarType::BFloat16 ? 0x1p-8
                                         : 0x1p-10;
}

}  // namespace fastvit::simulate
