// The O(C) part of every op on the CPU, in double: merging moments, running statistics, per-channel tables.
// The activation-sized part is in the kernels. They are compiled once per instruction set, and chosen here.
#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "../moments.h"
#include "../sync/cpu_peer.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastvit {
namespace {

struct Kernels {
  const char* name;
  void (*stats)(const StatsParams&);
  void (*forward)(const ForwardParams&);
  void (*reduce)(const ReduceParams&);
  void (*backward)(const BackwardParams&);
  void (*layer_norm_forward)(const LayerNormForwardParams&);
  void (*layer_norm_backward)(const LayerNormBackwardParams&);
  void (*act_forward)(const ActParams&);
  void (*act_backward)(const ActParams&);
};

#define FASTVIT_KERNELS(capability)                                                                \
  Kernels {                                                                                        \
    #capability, capability::stats, capability::forward, capability::reduce, capability::backward, \
        capability::layer_norm_forward, capability::layer_norm_backward, capability::act_forward,  \
        capability::act_backward                                                                   \
  }

// ATEN_CPU_CAPABILITY=default|avx2|avx512 lowers the choice, as in torch.
Kernels choose_kernels() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string most = wish ? wish : "avx512";
  unsigned eax, ebx, ecx, edx;  // older clangs do not know f16c by name
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && most == "avx512") return FASTVIT_KERNELS(avx512);
  if (avx2 && most != "default") return FASTVIT_KERNELS(avx2);
#endif
  return FASTVIT_KERNELS(baseline);
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

constexpr int64_t kTaskElements = 1 << 16;     // fewest elements that are worth a task
constexpr int64_t kValuesPerPartial = 1 << 8;  // so that partial results are far smaller than the activation
constexpr int64_t kMostSlices = 64, kMostTasks = 256;
constexpr int64_t kLongPlane = 512;   // elements of a plane that is summed by itself
constexpr int64_t kEnoughTasks = 32;  // with fewer, rows are divided into blocks of channels

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

Partition partition_of(const Layout& layout) {
  const int64_t span = layout.rows ? layout.C : layout.S;
  Partition p{};
  p.pieces = std::max<int64_t>(1, ceil_div(span, kPiece));
  p.piece = std::min<int64_t>(kPiece, ceil_div(ceil_div(span, p.pieces), 16) * 16);
  p.pieces = std::max<int64_t>(1, ceil_div(span, std::max<int64_t>(p.piece, 1)));
  p.planes = layout.S < kLongPlane ? kPiece / std::max<int64_t>(layout.S, 1) : 1;
  p.steps = layout.rows ? layout.N : layout.N * p.pieces;
  const int64_t tasks = std::clamp<int64_t>(ceil_div(layout.numel(), kTaskElements), 1, kMostTasks);
  p.slices = std::clamp<int64_t>(std::min({p.steps, tasks, kMostSlices, layout.count() / kValuesPerPartial}),
                                 1, kMostSlices);
  const int64_t wanted = layout.rows ? std::min(tasks, kEnoughTasks) : tasks;
  p.blocks = std::clamp<int64_t>(ceil_div(wanted, p.slices), 1, std::max<int64_t>(layout.C, 1));
  if (layout.rows) p.blocks = std::max(std::min(p.blocks, ceil_div(layout.C, 64)), p.pieces);
  return p;
}

double number(const Channels& t, int64_t c, double absent) {
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

void set_number(const Channels& t, int64_t c, double value) {
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

}  // namespace

const char* cpu_capability() {
  return kernels().name;
}

void Cpu::stats(const StatsArgs& args) {
  const Layout& layout = args.layout;
  const int64_t C = layout.C;
  const Partition partition = partition_of(layout);
  std::vector<double> partial(partition.slices * 2 * C);
  if (layout.numel() > 0) kernels().stats({layout, partition, args.dtype, args.x, partial.data()});
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    A* moments = static_cast<A*>(args.moments);
    double *mean = partial.data(), *m2 = mean + C;  // of the first slice, which the others join
    for (int64_t s = 1; s < partition.slices; ++s) {
      const int64_t begin = values_before(layout, partition, partition.steps * s / partition.slices),
                    end = values_before(layout, partition, partition.steps * (s + 1) / partition.slices);
      const Joining joining = Joining::of(double(begin), double(end - begin));
      const double* slice = mean + s * 2 * C;
      for (int64_t c = 0; c < C; ++c) joining.join(mean[c], m2[c], slice[c], slice[C + c]);
    }
    for (int64_t i = 0; i < 2 * C; ++i) moments[i] = A(mean[i]);
    store_count(moments + 2 * C, double(layout.count()));
    if (args.exchange) share(*args.exchange, moments, moments, C);
  });
}

void Cpu::forward(const ForwardArgs& args) {
  const int64_t C = args.layout.C;
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const A* moments = static_cast<const A*>(args.moments);
    const A* given = static_cast<const A*>(args.given);
    A* saved = static_cast<A*>(args.saved);
    double count = std::numeric_limits<double>::infinity(), factor = args.momentum;
    if (moments) {
      count = load_count(moments + 2 * C);
      if (args.num_batches_tracked && !std::isnan(count)) {
        ++*args.num_batches_tracked;
        if (args.cumulative) factor = 1.0 / double(*args.num_batches_tracked);
      }
    }
    Tables<A> table(3, C);
    for (int64_t c = 0; c < C; ++c) {
      double mean, variance;
      if (given) {
        mean = given[c];
        variance = 0;
      } else if (moments) {
        const double m2 = moments[C + c];
        mean = moments[c];
        variance = count == 0 ? 0 : m2 / count;  // NaN after a failed exchange
        if (args.running_mean.data && count > 0) {
          const double unbiased = m2 / std::max(count - 1, 1.0);
          const double old_mean = number(args.running_mean, c, 0), old_var = number(args.running_var, c, 1);
          set_number(args.running_mean, c, old_mean + factor * (mean - old_mean));
          set_number(args.running_var, c, old_var + factor * (unbiased - old_var));
        }
      } else {
        mean = number(args.running_mean, c, 0);
        variance = number(args.running_var, c, 1);
      }
      const A invstd = given ? given[C + c] : A(1 / std::sqrt(variance + args.eps));
      table[0][c] = A(mean);
      table[1][c] = A(gamma_of(args, c) * double(invstd));
      table[2][c] = A(number(args.bias, c, 0));
      if (!given) saved[c] = A(mean), saved[C + c] = invstd;
    }
    if (moments) {
      store_count(saved + 2 * C, count);
    } else if (!given) {
      saved[2 * C] = std::numeric_limits<A>::infinity();
      saved[2 * C + 1] = 0;
    }
    if (args.layout.numel() > 0)
      kernels().forward({args.layout, partition_of(args.layout), args.dtype, args.activation,
                         args.activation_param, args.x, args.z, args.y, table[0], table[1], table[2]});
  });
}

void Cpu::reduce(const ReduceArgs& args) {
  const int64_t C = args.layout.C;
  const Partition partition = partition_of(args.layout);
  std::vector<double> partial(partition.slices * 2 * C);
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const A* saved = static_cast<const A*>(args.saved);
    A* sums = static_cast<A*>(args.sums);
    const double count = load_count(saved + 2 * C);
    Tables<A> table(3, C);
    for (int64_t c = 0; c < C; ++c) {
      const double gamma = gamma_of(args, c);
      table[0][c] = A(number(args.bias, c, 0));
      table[1][c] = A(gamma * double(saved[C + c]));
      table[2][c] = A(1 / gamma);
    }
    ReduceParams kernel{args.layout,
                        partition,
                        args.dtype,
                        args.in_place,
                        args.activation,
                        args.activation_param,
                        std::sqrt(std::max(count - 1, 0.0)),
                        args.input,
                        args.dy,
                        args.z,
                        saved,
                        table[1],
                        table[0],
                        table[2],
                        partial.data()};
    if (args.layout.numel() > 0) kernels().reduce(kernel);
    for (int64_t s = 1; s < partition.slices; ++s)
      for (int64_t i = 0; i < 2 * C; ++i) partial[i] += partial[s * 2 * C + i];
    for (int64_t c = 0; c < C; ++c) {
      sums[c] = A(partial[c]);
      sums[C + c] = A(args.in_place ? partial[C + c] : partial[C + c] * double(saved[C + c]));
    }
    if (args.exchange) share(*args.exchange, sums, sums + 2 * C, C);
  });
}

void Cpu::backward(const BackwardArgs& args) {
  const int64_t C = args.layout.C;
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const A* saved = static_cast<const A*>(args.saved);
    const A* sums = static_cast<const A*>(args.sums);
    const double count = load_count(saved + 2 * C);
    Tables<A> table(5, C);
    for (int64_t c = 0; c < C; ++c) {
      const double invstd = saved[C + c];
      table[0][c] = A(number(args.weight, c, 1) * invstd);  // the floor applies to the inversion only
      table[1][c] = A(number(args.bias, c, 0));
      table[2][c] = A(1 / gamma_of(args, c));
      table[3][c] = sums && count > 0 ? A(sums[c] / count) : A(0);
      table[4][c] = sums && count > 0 ? A(sums[C + c] / count * (args.in_place ? 1 : invstd)) : A(0);
    }
    if (args.layout.numel() > 0)
      kernels().backward({args.layout, partition_of(args.layout), args.dtype, args.in_place, args.activation,
                          args.activation_param, std::sqrt(std::max(count - 1, 0.0)), args.input, args.dy,
                          args.z, args.dx, args.dz, saved, table[0], table[1], table[2], table[3], table[4]});
  });
}

namespace {

constexpr int64_t kRowsPerSlice = 16;  // at least: keeps a slice's sums smaller than its rows

// weight or bias in the accumulation type.
template <class A>
std::vector<A> column_table(const Channels& given, int64_t columns, double absent) {
  std::vector<A> table(columns);
  for (int64_t c = 0; c < columns; ++c) table[c] = A(number(given, c, absent));
  return table;
}

}  // namespace

void Cpu::layer_norm_forward(const LayerNormForwardArgs& args) {
  if (args.rows == 0) return;
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const auto gamma = column_table<A>(args.weight, args.columns, 1),
               beta = column_table<A>(args.bias, args.columns, 0);
    kernels().layer_norm_forward({args.rows, args.columns, args.dtype, args.output_dtype, args.eps, args.x,
                                  args.y, gamma.data(), beta.data(), args.saved});
  });
}

void Cpu::layer_norm_backward(const LayerNormBackwardArgs& args) {
  const int64_t D = args.columns, stride = ceil_div(D, 16) * 16;
  const int64_t slices = std::clamp<int64_t>(
      std::min(ceil_div(args.rows * D, kTaskElements), args.rows / kRowsPerSlice), 1, kMostSlices);
  with_accumulation(args.dtype, [&](auto zero) {
    using A = decltype(zero);
    const auto gamma = column_table<A>(args.weight, D, 1);
    std::vector<A> group(args.sums ? slices * 2 * stride : 0);
    std::vector<double> partial(args.sums ? slices * 2 * D : 0);
    if (args.rows > 0)
      kernels().layer_norm_backward({args.rows, D, args.dtype, args.output_dtype, slices, args.x, args.dy,
                                     args.dx, gamma.data(), args.saved, stride,
                                     args.sums ? group.data() : nullptr, partial.data()});
    A* sums = static_cast<A*>(args.sums);
    for (int64_t i = 0; sums && i < 2 * D; ++i) {
      double sum = 0;
      for (int64_t s = 0; s < slices; ++s) sum += partial[s * 2 * D + i];
      sums[i] = A(sum);
    }
  });
}

namespace {

ActParams act_params(const ActArgs& args) {
  return {args.layout,
          partition_of(args.layout),
          args.dtype,
          args.activation,
          args.activation_param,
          args.x,
          args.b,
          args.dy,
          args.out,
          args.db};
}

}  // namespace

void Cpu::act_forward(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act_forward(act_params(args));
}

void Cpu::act_backward(const ActArgs& args) {
  if (args.layout.numel() > 0) kernels().act_backward(act_params(args));
}

}  // namespace fastvit
