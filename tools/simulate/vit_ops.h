// LayerNorm, activations and gates on GPGPU-Sim, compared with plain sums in double precision.
#pragma once

#include <optional>
#include <random>

#include "checks.h"

namespace fastvit::simulate {

class Numbers {
 public:
  explicit Numbers(uint32_t seed) : random(seed) {}
  Values normal(int64_t n, double scale = 1, double offset = 0) {
    Values found;
    for (int64_t i = 0; i < n; ++i) found.push_back(offset + scale * distribution(random));
    return found;
  }

 private:
  std::mt19937 random;
  std::normal_distribution<double> distribution;
};

inline Channels of(const std::optional<Array>& array) {
  return array ? Channels{array->data(), array->dtype} : Channels{};
}

struct LayerNormCase {
  ScalarType dtype, output_dtype;
  int64_t rows, columns;
  bool affine = true;

  std::string name() const {
    return std::string("layer_norm ") + name_of(dtype) + " to " + name_of(output_dtype) + " " +
           std::to_string(rows) + "x" + std::to_string(columns) + (affine ? "" : " plain");
  }

  void run(Checks& checks) const {
    const Shape shape{Walk::planes, rows, columns, 1};
    Numbers numbers{uint32_t(rows * columns)};
    Array x("x", dtype, shape, numbers.normal(rows * columns, 1.5, 0.5));
    Array dy("dy", output_dtype, shape, numbers.normal(rows * columns));
    std::optional<Array> weight, bias;
    if (affine) weight.emplace("weight", ScalarType::Float, row(columns), numbers.normal(columns));
    if (affine) bias.emplace("bias", ScalarType::Float, row(columns), numbers.normal(columns));
    const Values v = x.read(), g = dy.read(), ones(size_t(columns), 1), zeros(size_t(columns), 0);
    const Values gamma = affine ? weight->read() : ones, beta = affine ? bias->read() : zeros;

    Values y, dx, means, invstds, sum_dy = zeros, sum_dy_xhat = zeros;
    for (int64_t r = 0; r < rows; ++r) {
      const double *const of_x = v.data() + r * columns, *const of_dy = g.data() + r * columns;
      const double n = double(columns);
      double mean = 0, var = 0, sum = 0, sum_xhat = 0;
      for (int64_t c = 0; c < columns; ++c) mean += of_x[c] / n;
      for (int64_t c = 0; c < columns; ++c) var += (of_x[c] - mean) * (of_x[c] - mean) / n;
      const double invstd = 1 / std::sqrt(var + kEps);
      const auto xhat = [&](int64_t c) { return (of_x[c] - mean) * invstd; };
      for (size_t c = 0; c < size_t(columns); ++c) {
        y.push_back(xhat(c) * gamma[c] + beta[c]);
        sum += of_dy[c] * gamma[c] / n;
        sum_xhat += of_dy[c] * gamma[c] * xhat(c) / n;
        sum_dy[c] += of_dy[c];
        sum_dy_xhat[c] += of_dy[c] * xhat(c);
      }
      for (size_t c = 0; c < size_t(columns); ++c)
        dx.push_back(invstd * (of_dy[c] * gamma[c] - sum - xhat(c) * sum_xhat));
      means.push_back(mean);
      invstds.push_back(invstd);
    }
    const auto joined = [](Values first, const Values& second) {
      first.insert(first.end(), second.begin(), second.end());
      return first;
    };
    const ScalarType wide = accumulated(dtype);

    Array out("y", output_dtype, shape), saved("saved", wide, row(2 * rows));
    LayerNormForwardArgs forward{common(x, weight, bias)};
    forward.y = out.data(), forward.saved = saved.data(), forward.eps = kEps;
    Cuda::layer_norm_forward(forward);
    checks.close("layer_norm_forward", out.read(), y, tolerance_of(output_dtype));
    checks.close("layer_norm_forward saved", saved.read(), joined(means, invstds), tolerance_of(wide));

    for (const bool parameters : {true, false}) {
      Array found("dx", dtype, shape), sums("sums", wide, row(2 * columns));
      LayerNormBackwardArgs backward{common(x, weight, bias)};
      backward.dy = dy.data(), backward.saved = saved.data(), backward.dx = found.data();
      backward.sums = parameters ? sums.data() : nullptr;
      Cuda::layer_norm_backward(backward);
      checks.close("layer_norm_backward", found.read(), dx, tolerance_of(dtype));
      if (parameters)
        checks.close("layer_norm_backward sums", sums.read(), joined(sum_dy, sum_dy_xhat), tolerance_of(wide),
                     double(rows));
    }
    checks.same("x", x, v);
    checks.same("dy", dy, g);
  }

 private:
  LayerNormArgs common(const Array& x, const std::optional<Array>& weight,
                       const std::optional<Array>& bias) const {
    return {rows, columns, dtype, output_dtype, 0, x.data(), of(weight), of(bias)};
  }
};

// `shape` is that of the inputs; what is written has no gaps.
struct ActCase {
  ScalarType dtype;
  Shape shape;
  Activation activation;
  bool gated;

  std::string name() const {
    return std::string(gated ? "glu " : "act ") + name_of(dtype) + " " + name_of(shape) + " " +
           kActivationNames[int(activation)];
  }

  void run(Checks& checks) const {
    const Shape dense{shape.walk == Walk::cropped ? Walk::planes : shape.walk, shape.N, shape.C, shape.S};
    const int64_t n = shape.numel();
    Numbers numbers{uint32_t(n + int(activation))};
    Array x("x", dtype, shape, numbers.normal(n, 2)), dy("dy", dtype, shape, numbers.normal(n));
    Array b("b", dtype, shape, numbers.normal(n));
    const Values v = x.read(), g = dy.read(), gate = gated ? b.read() : Values(size_t(n), 1);
    const double param = parameter(activation);
    Values y, dx, db;
    for (size_t i = 0; i < size_t(n); ++i) {
      y.push_back(act(activation, v[i], param) * gate[i]);
      dx.push_back(g[i] * gate[i] * slope(activation, v[i], param));
      db.push_back(g[i] * act(activation, v[i], param));
    }
    ActArgs args{};
    args.dtype = dtype, args.activation = activation, args.activation_param = param;
    args.x = x.data(), args.b = gated ? b.data() : nullptr;

    Array out("y", dtype, dense);
    args.layout = gated ? layout_of(x, out, b) : layout_of(x, out);
    args.out = out.data();
    Cuda::act_forward(args);
    checks.close(gated ? "glu_forward" : "act_forward", out.read(), y, tolerance_of(dtype));

    Array found("dx", dtype, dense), of_gate("db", dtype, dense);
    args.layout = gated ? layout_of(x, dy, found, b, of_gate) : layout_of(x, dy, found);
    args.dy = dy.data(), args.out = found.data(), args.db = gated ? of_gate.data() : nullptr;
    Cuda::act_backward(args);
    checks.close(gated ? "glu_backward" : "act_backward", found.read(), dx, tolerance_of(dtype));
    if (gated) checks.close("glu_backward db", of_gate.read(), db, tolerance_of(dtype));
    checks.same("x", x, v);
    checks.same("dy", dy, g);
    if (gated) checks.same("b", b, gate);
  }
};

// Rows of one warp's lanes and of several, of a block, and longer than what a block holds; rows that fill no
// packets; more rows than blocks take at once.
inline std::vector<LayerNormCase> layer_norm_cases() {
  using enum ScalarType;
  std::vector<LayerNormCase> found;
  for (const auto [dtype, output] :
       {std::pair{Float, Float}, std::pair{Float, BFloat16}, std::pair{Float, Half},
        std::pair{BFloat16, BFloat16}, std::pair{Half, Half}, std::pair{Double, Double}}) {
    for (const auto [rows, columns] :
         {std::pair{9, 24}, std::pair{5, 37}, std::pair{3, 768}, std::pair{2, 4104}, std::pair{2, 2061}})
      found.push_back({dtype, output, rows, columns});
    found.push_back({dtype, output, 4, 40, false});
  }
  found.push_back({Float, BFloat16, 100, 1040});
  found.push_back({BFloat16, BFloat16, 100, 1040});
  return found;
}

// One plane, as operands that lie alike; parts of wider rows; channels_last; single elements.
inline std::vector<ActCase> act_cases() {
  using enum Activation;
  std::vector<ActCase> found;
  for (const ScalarType dtype :
       {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double})
    for (const Shape& shape : {Shape{Walk::planes, 1, 1, 1500}, Shape{Walk::cropped, 3, 2, 61},
                               Shape{Walk::rows, 3, 16, 20}, Shape{Walk::rows, 3, 7, 11}})
      for (const Activation activation : {leaky_relu, hardswish, elu, gelu, gelu_tanh, silu})
        for (const bool gated : {false, true}) found.push_back({dtype, shape, activation, gated});
  return found;
}

}  // namespace fastvit::simulate
