// The engine's controls, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <string>
#include <vector>

#include "../../csrc/cuda/merge_slices.cuh"
#include "cuda_runtime.h"

extern "C" int cuda_host_allocations;
extern "C" uint64_t cuda_host_requests;

namespace cuda_host {
std::set<std::string> kernels();

// The plan of an op that reads and writes `operands` aligned tensors that lie alike, on so many
// multiprocessors with `resident` blocks each and `smem` bytes of a block for vectors.
pybind11::dict plan(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int channel_dim,
                    int element_size, int operands, int merged_operands, int multiprocessors, int resident,
                    int64_t smem) {
  using namespace fastvit;
  const int64_t* const s = strides.data();
  const int64_t* const lying[kMaxOperands] = {s, s, s, s, s};
  const void* pointers[kMaxOperands] = {};
  const WalkLayout layout = make_walk_layout(int(sizes.size()), sizes.data(), channel_dim, operands, lying);
  const DeviceLimits limits{multiprocessors, kBlocksPerMultiprocessor, smem};
  const auto blocks = [&](const LaunchPlan&) { return resident; };
  const LaunchPlan p = LaunchPlanner{.layout = layout,
                                     .pointers = pointers,
                                     .operands = operands,
                                     .element_size = element_size,
                                     .limits = limits,
                                     .merged_operands = merged_operands}
                           .plan(blocks);
  pybind11::dict found;
  found["rows"] = p.is_rows, found["vector"] = p.is_vectorized, found["units"] = p.units;
  found["groups"] = MergeGroups(p).size > 1 ? MergeGroups(p).count : 0;
  return found;
}
}  // namespace cuda_host

PYBIND11_MODULE(_cuda_host, m) {
  using cuda_host::Config;
  pybind11::class_<Config>(m, "Config")
      .def_readwrite("seed", &Config::seed, "0: in index order; otherwise a random but repeatable schedule")
      .def_readwrite("sm_count", &Config::sm_count, "multiprocessors of the device")
      .def_readwrite("blocks_per_sm", &Config::blocks_per_sm, "co-resident blocks of a cooperative launch")
      .def_readwrite("shared_per_sm", &Config::shared_per_sm, "bytes of shared memory of a multiprocessor")
      .def_readwrite("capturing", &Config::capturing, "whether launches are captured into a graph")
      .def_readwrite("built", &Config::built, "whether the kernels have code for the device")
      .def_readwrite("cooperative", &Config::cooperative, "whether blocks of a grid may wait for each other")
      .def_readwrite("stream", &Config::stream, "the current stream, by number")
      .def_readwrite("resident", &Config::resident,
                     "blocks that a device holds at most; 0: a few of each grid")
      .def_readwrite("deferred", &Config::deferred, "launches queue up until run()");
  m.attr("config") = pybind11::cast(&cuda_host::config(), pybind11::return_value_policy::reference);
  m.def("run", &cuda_host::run, "Runs the deferred launches of all devices and streams, interleaved.");
  m.def("steps", &cuda_host::steps, "Switches between emulated threads so far.");
  m.def("blocks", &cuda_host::blocks, "Blocks of the latest launch.");
  m.def("kernels", &cuda_host::kernels, "Names of the kernels kernel_params since the last call.");
  m.def("allocations", [] { return cuda_host_allocations; }, "Memory of torch's allocator that is in use.");
  m.def("launches", &cuda_host::launches, "Kernels kernel_params so far.");
  m.def("requests", [] { return cuda_host_requests; }, "Tensors made by the ops so far, and scratch memory.");
  m.def("memsets", [] { return cuda_host::memsets(); }, "Memsets on streams so far.");
  m.def("queries", &cuda_host::queries,
        "Queries of attributes of devices and kernels, and settings of kernels' attributes, so far.");
  m.def("plan", &cuda_host::plan, "How csrc/cuda/plan.h divides an op.");
  m.def("set_device", [](int device) { cudaSetDevice(device); });
}
