// Calls the launchers of the ops on GPGPU-Sim and compares what they write with reference.h and vit_ops.h.
//
//     driver [filter]    only the cases whose name contains it
//
// With SIMULATE_TIMING, local ops whose blocks wait for each other; else all ops whose blocks do not.
// Every tensor lies between guards, inputs must stay what they were, outputs begin as NaN.
#include <cstdlib>
#include <random>

#include "checks.h"
#include "simulated.h"
#include "vit_ops.h"

namespace fastvit::simulate {

struct Case {
  ScalarType dtype;
  Shape shape;
  Activation activation;
  bool residual = false;

  bool in_place() const { return is_invertible(activation) && !residual; }
  std::string name() const {
    return std::string(name_of(dtype)) + " " + name_of(shape) + " " + kActivationNames[int(activation)] +
           (residual ? " residual" : "");
  }
};

class Run {
 public:
  Run(const Case& test, Checks& checks)
      : test(test), checks(checks), random(uint32_t(test.shape.numel() + int(test.activation))) {
    const Shape& shape = test.shape;
    Values means, spreads, inputs, gradients, residuals, gammas, betas;
    for (int64_t c = 0; c < shape.C; ++c) {
      means.push_back(normal() * 2);
      spreads.push_back(0.5 + std::fabs(normal()));
      gammas.push_back((c % 3 ? 1 : -1) * (0.5 + 0.1 * double(c % 9)));
      betas.push_back(0.2 * normal());
    }
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const size_t c = size_t(i / shape.S % shape.C);
      inputs.push_back(means[c] + spreads[c] * normal());
      gradients.push_back(normal());
      residuals.push_back(normal());
    }
    x.emplace("x", test.dtype, shape, inputs);
    dy.emplace("dy", test.dtype, shape, gradients);
    if (test.residual) z.emplace("z", test.dtype, shape, residuals);
    weight.emplace("weight", ScalarType::Float, row(shape.C), gammas);
    bias.emplace("bias", ScalarType::Float, row(shape.C), betas);
    x_values = x->read(), dy_values = dy->read(), w = weight->read(), b = bias->read();
    if (z) z_values = z->read();
    for (int64_t c = 0; c < shape.C; ++c)
      channels.push_back(measure(channel(x_values, shape, c), w[size_t(c)], b[size_t(c)], kEps));
  }

  // Local ops alone, whose blocks must have waited for each other.
  void together() {
    const size_t before = simulated_together();
    const Array saved = forward("bn_forward without moments", nullptr, false);
    if (test.in_place()) forward("abn_forward_ without moments", nullptr, true);
    backward(saved, false, true);
    if (test.in_place()) backward(saved, true, true);
    const size_t expected = test.in_place() ? 4 : 2, waited = simulated_together() - before;
    checks.report("launches whose blocks wait for each other: " + std::to_string(waited), waited == expected,
                  0, 0);
    inputs_unchanged();
  }
  void all() {
    Array moments = statistics();
    Array saved = forward("bn_forward", &moments, false);
    if (test.in_place()) forward("abn_forward_", &moments, true);
    forward("bn_forward without moments", nullptr, false);
    if (test.in_place()) forward("abn_forward_ without moments", nullptr, true);
    backward(saved, false, false);
    if (test.in_place()) backward(saved, true, false);
    inputs_unchanged();
  }

 private:
  void inputs_unchanged() {
    checks.same("x", *x, x_values);
    checks.same("dy", *dy, dy_values);
    if (z) checks.same("z", *z, z_values);
    checks.same("weight", *weight, w);
    checks.same("bias", *bias, b);
  }
  double normal() { return distribution(random); }
  Channels of(const Array& array) const { return {array.data(), array.dtype}; }
  int64_t C() const { return test.shape.C; }

  Values per_channel(double (*of_channel)(const Channel&)) const {
    Values found;
    for (const Channel& c : channels) found.push_back(of_channel(c));
    return found;
  }
  // [first[C], second[C]], and the count, which is whole, behind them.
  void check_packed(const std::string& what, Array& array, const Values& first, const Values& second,
                    double scale) {
    Values values = array.read(), count(values.begin() + 2 * C(), values.end());
    values.resize(size_t(2 * C()));
    Values expected = first;
    expected.insert(expected.end(), second.begin(), second.end());
    checks.close(what, values, expected, tolerance_of(accumulated(test.dtype)), scale);
    if (!count.empty()) checks.close(what + " count", {load_count(count.data())}, {channels[0].n}, 0);
  }

  Array statistics() {
    Array moments("moments", accumulated(test.dtype), row(2 * C() + 2));
    Cuda::stats({layout_of(*x), test.dtype, 0, x->data(), moments.data(), nullptr});
    check_packed("bn_stats", moments, per_channel([](const Channel& c) { return c.mean; }),
                 per_channel([](const Channel& c) { return c.m2; }), 1);
    return moments;
  }

  template <class Args>
  void norm(Args& args, bool in_place) const {
    args.dtype = test.dtype;
    args.in_place = in_place;
    args.z = z ? z->data() : nullptr;
    args.weight = of(*weight);
    args.bias = of(*bias);
    args.activation = test.activation;
    args.activation_param = parameter(test.activation);
  }

  // Of the moments, or by the local op, with x's own statistics. Returns what backward needs.
  Array forward(const std::string& op, const Array* moments, bool in_place) {
    Array saved("saved", accumulated(test.dtype), row(2 * C() + 2));
    Array y = in_place ? Array("y", test.dtype, test.shape, x_values) : Array("y", test.dtype, test.shape);
    const Values old_mean(size_t(C()), 0.5), old_var(size_t(C()), 2);
    Array running_mean("running_mean", ScalarType::Float, row(C()), old_mean);
    Array running_var("running_var", ScalarType::Float, row(C()), old_var);
    Array batches("num_batches_tracked", ScalarType::Long, row(1), {7});
    ForwardArgs args{};
    norm(args, in_place);
    const Array& input = in_place ? y : *x;
    args.layout = z ? layout_of(input, y, *z) : layout_of(input, y);
    args.x = input.data();
    args.y = y.data();
    args.moments = moments ? moments->data() : nullptr;
    args.running_mean = of(running_mean);
    args.running_var = of(running_var);
    args.num_batches_tracked = static_cast<int64_t*>(batches.data());
    args.momentum = kMomentum;
    args.eps = kEps;
    args.saved = saved.data();
    if (moments)
      Cuda::forward(args);
    else if (!Cuda::local_forward(args))
      return saved;  // it does not fit on chip: the ops above are what such a tensor takes

    Values expected(x_values.size()), mean, var;
    for (int64_t c = 0; c < C(); ++c) {
      const Channel& of_c = channels[size_t(c)];
      Values v = channel(x_values, test.shape, c);
      const Values residual = z ? channel(z_values, test.shape, c) : Values();
      for (size_t i = 0; i < v.size(); ++i)
        v[i] = act(test.activation, of_c.affine(v[i]) + (z ? residual[i] : 0), parameter(test.activation));
      set_channel(expected, test.shape, c, v);
      mean.push_back(0.5 + kMomentum * (of_c.mean - 0.5));
      var.push_back(2 + kMomentum * (of_c.m2 / (of_c.n - 1) - 2));
    }
    checks.close(op, y.read(), expected, tolerance_of(test.dtype));
    check_packed(op + " saved", saved, per_channel([](const Channel& c) { return c.mean; }),
                 per_channel([](const Channel& c) { return c.invstd(); }), 1);
    checks.close(op + " running_mean", running_mean.read(), mean, tolerance_of(ScalarType::Float));
    checks.close(op + " running_var", running_var.read(), var, tolerance_of(ScalarType::Float));
    checks.close(op + " num_batches_tracked", batches.read(), {8}, 0);
    if (in_place) this->y.emplace("y", test.dtype, test.shape, y.read());
    return saved;
  }

  void backward(const Array& saved, bool in_place, bool only_local) {
    const std::string prefix = in_place ? "abn_" : "bn_";
    Array& kept = in_place ? *y : *x;
    const Values kept_values = kept.read();
    Values dx_expected(x_values.size()), dz_expected(x_values.size()), first, second;
    for (int64_t c = 0; c < C(); ++c) {
      const Gradients g =
          gradients(channels[size_t(c)], in_place, channel(kept_values, test.shape, c),
                    channel(dy_values, test.shape, c), z ? channel(z_values, test.shape, c) : Values(),
                    test.activation, parameter(test.activation));
      set_channel(dx_expected, test.shape, c, g.dx);
      set_channel(dz_expected, test.shape, c, g.dz);
      first.push_back(g.sum_dz);
      second.push_back(g.sum_dz_xhat);
    }
    const auto set = [&](auto& args) {
      norm(args, in_place);
      args.input = kept.data();
      args.dy = dy->data();
      args.saved = saved.data();
    };
    const auto check_gradients = [&](const std::string& op, Array& dx, std::optional<Array>& dz) {
      checks.close(op, dx.read(), dx_expected, tolerance_of(test.dtype));
      if (dz) checks.close(op + " dz", dz->read(), dz_expected, tolerance_of(test.dtype));
    };
    const double scale = channels[0].n;  // of a sum of so many values

    Array sums("sums", accumulated(test.dtype), row(2 * C()));
    if (!only_local) {
      ReduceArgs reduce{};
      set(reduce);
      reduce.layout = z ? layout_of(kept, *dy, *z) : layout_of(kept, *dy);
      reduce.sums = sums.data();
      Cuda::reduce(reduce);
      check_packed(prefix + "reduce", sums, first, second, scale);
    }

    for (const bool local : {false, true}) {
      if (only_local && !local) continue;
      const std::string op = prefix + (local ? "backward without sums" : "backward");
      Array dx("dx", test.dtype, test.shape);
      std::optional<Array> dz;
      if (z) dz.emplace("dz", test.dtype, test.shape);
      Array own("sums", accumulated(test.dtype), row(2 * C()));
      BackwardArgs args{};
      set(args);
      args.layout = z ? layout_of(kept, *dy, dx, *z, *dz) : layout_of(kept, *dy, dx);
      args.dx = dx.data();
      args.dz = z ? dz->data() : nullptr;
      args.sums = local ? nullptr : sums.data();
      args.local_sums = local ? own.data() : nullptr;
      if (!local)
        Cuda::backward(args);
      else if (!Cuda::local_backward(args))
        continue;
      check_gradients(op, dx, dz);
      if (local) check_packed(op + " sums", own, first, second, scale);
    }
    if (in_place) checks.same("y", kept, kept_values);
  }

  const Case test;
  Checks& checks;
  std::mt19937 random;
  std::normal_distribution<double> distribution;
  std::optional<Array> x, y, dy, z, weight, bias;
  Values x_values, dy_values, z_values, w, b;
  std::vector<Channel> channels;
};

// Planes with and without ends that fill no packet, or of single elements; rows with and without packets;
// short planes that are rows; slices of one block and of several.
std::vector<Case> cases() {
  using enum Activation;
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                   ScalarType::Double};
  const Shape planes{Walk::planes, 3, 5, 200}, rows{Walk::rows, 4, 24, 35}, narrow{Walk::rows, 3, 7, 11},
      single{Walk::cropped, 2, 5, 3};
  std::vector<Case> found;
  for (const ScalarType dtype : kTypes) {
    for (const Shape& shape : {planes, rows, narrow, single, Shape{Walk::planes, 2, 3, 520},
                               Shape{Walk::planes, 16, 16, 9}, Shape{Walk::cropped, 2, 5, 37}})
      for (const Activation activation : {leaky_relu, elu}) found.push_back({dtype, shape, activation});
    for (const Shape& shape : {planes, rows, narrow, single})
      for (const Activation activation : {relu, silu}) found.push_back({dtype, shape, activation, true});
  }
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16})
    for (const Activation activation : {identity, relu, relu6, gelu, gelu_tanh, silu, hardswish})
      for (const Shape& shape : {Shape{Walk::planes, 2, 3, 96}, Shape{Walk::rows, 3, 16, 20}})
        found.push_back({dtype, shape, activation});
  // Slices merge: in one level, and in two.
  found.push_back({ScalarType::Float, {Walk::planes, 40, 2, 300}, leaky_relu});
  found.push_back({ScalarType::BFloat16, {Walk::rows, 8, 256, 150}, leaky_relu});
  return found;
}

// Local ops of two or three slices: a launch takes half a minute.
std::vector<Case> cases_together() {
  using enum Activation;
  return {{ScalarType::Float, {Walk::rows, 2, 24, 170}, leaky_relu},
          {ScalarType::Float, {Walk::planes, 4, 2, 300}, elu},
          {ScalarType::BFloat16, {Walk::rows, 2, 24, 340}, elu},
          {ScalarType::Half, {Walk::planes, 3, 2, 600}, relu, true}};
}

}  // namespace fastvit::simulate

namespace {

template <class Case, class F>
void each(const std::vector<Case>& cases, const std::string& filter, fastvit::simulate::Checks& checks,
          const F& run) {
  for (const Case& test : cases) {
    if (test.name().find(filter) == std::string::npos) continue;
    checks.where = test.name();
    try {
      run(test);
    } catch (const std::exception& error) {
      checks.report(error.what(), false, NAN, 0);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  using namespace fastvit::simulate;
  const std::string filter = count > 1 ? arguments[1] : "";
  Checks checks;
  const auto run = [&](const auto& test) { test.run(checks); };
  if (std::getenv("SIMULATE_TIMING")) {
    each(cases_together(), filter, checks, [&](const Case& test) { Run(test, checks).together(); });
  } else {
    each(cases(), filter, checks, [&](const Case& test) { Run(test, checks).all(); });
    each(layer_norm_cases(), filter, checks, run);
    each(act_cases(), filter, checks, run);
  }
  std::fprintf(stderr, "%d checks, %d failed; %zu kernels ran\n", checks.made, checks.failed,
               simulated_kernels());
  return checks.failed > 0;
}
