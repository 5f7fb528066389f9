// The Python module _cuda_host. Tests use it to control the CPU model of CUDA, to ask what the model ran, and
// to ask how csrc/cuda/plan.h divides an op.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <string>
#include <vector>

#include "../../csrc/cuda/merge_slices.cuh"
#include "cuda_runtime.h"

extern "C" int cuda_host_allocations;
extern "C" uint64_t cuda_host_requests;
extern "C" int cuda_host_failing_request;

namespace cuda_host {
std::set<std::string> kernels();

// Plans an op whose `operands` tensors are aligned and have equal sizes and strides, for a device with so
// many multiprocessors. A multiprocessor has `resident_blocks` blocks of the kernel, each with
// `smem_cache_bytes` of shared memory for the data of a single launch. See LaunchPlanner for reduced_operands.
// tiles_at_once is that of the single launch, 0 if there can be none.
pybind11::dict plan(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int channel_dim,
                    int element_size, int operands, int reduced_operands, int multiprocessors,
                    int resident_blocks, int64_t smem_cache_bytes) {
  using namespace fastvit;
  const int64_t* const operand_strides[kMaxOperands] = {strides.data(), strides.data(), strides.data(),
                                                        strides.data(), strides.data()};
  const void* null_pointers[kMaxOperands] = {};  // an address of 0 is aligned
  const WalkLayout layout =
      make_walk_layout(int(sizes.size()), sizes.data(), channel_dim, operands, operand_strides);
  const DeviceLimits limits{multiprocessors, kBlocksPerMultiprocessor, smem_cache_bytes};
  const LaunchPlanner planner{.layout = layout,
                              .pointers = null_pointers,
                              .operands = operands,
                              .element_size = element_size,
                              .limits = limits,
                              .reduced_operands = reduced_operands};
  const LaunchPlan launch_plan = planner.plan([&](const LaunchPlan&) { return resident_blocks; }),
                   single_launch_plan = planner.plan_single_launch();
  const MergeGroups groups(launch_plan);
  pybind11::dict result;
  result["rows"] = launch_plan.is_rows;
  result["vector"] = launch_plan.is_vectorized;
  result["units"] = launch_plan.units;
  result["groups"] = groups.size > 1 ? groups.count : 0;
  result["tiles"] = launch_plan.tiles;
  result["slices"] = launch_plan.slices;
  result["vectors_in_shared"] = single_launch_plan.vectors_in_shared;
  result["tiles_at_once"] = single_launch_plan.vectors_in_shared ? single_launch_plan.tiles_at_once : 0;
  return result;
}
}  // namespace cuda_host

PYBIND11_MODULE(_cuda_host, m) {
  using cuda_host::Config;
  pybind11::class_<Config>(m, "Config")
      .def_readwrite(
          "seed", &Config::seed,
          "0: threads run in the order of their indices; otherwise a random order that the seed repeats")
      .def_readwrite("sm_count", &Config::sm_count, "multiprocessors of the device")
      .def_readwrite("blocks_per_sm", &Config::blocks_per_sm, "co-resident blocks of a cooperative launch")
      .def_readwrite("shared_per_sm", &Config::shared_per_sm, "bytes of shared memory of a multiprocessor")
      .def_readwrite("capturing", &Config::capturing, "whether launches are captured into a graph")
      .def_readwrite("built", &Config::built, "whether the kernels have code for the device")
      .def_readwrite("cooperative", &Config::cooperative, "whether blocks of a grid may wait for each other")
      .def_readwrite("stream", &Config::stream, "the current stream, by number")
      .def_readwrite("resident", &Config::resident,
                     "most blocks that a device runs at the same time; 0: a few of each grid")
      .def_readwrite("checks_races", &Config::checks_races,
                     "whether the race build reports unordered accesses; else it only counts bytes, faster")
      .def_readwrite("deferred", &Config::deferred, "whether launches are queued until run()");
  m.attr("config") = pybind11::cast(&cuda_host::config(), pybind11::return_value_policy::reference);
  m.def("run", &cuda_host::run, "Runs the deferred launches of all devices and streams, interleaved.");
  m.def("steps", &cuda_host::steps, "Switches between emulated threads so far.");
  m.def("blocks", &cuda_host::blocks, "Blocks of the latest launch.");
  m.def("bytes", &cuda_host::bytes,
        "Bytes of global memory that kernels have read and written so far, in the race build; zeros in "
        "others.");
  m.def("kernels", &cuda_host::kernels, "Names of the kernels launched since the last call.");
  m.def("allocations", [] { return cuda_host_allocations; }, "Memory of torch's allocator that is in use.");
  m.def("launches", &cuda_host::launches, "Kernels launched so far.");
  m.def("requests", [] { return cuda_host_requests; }, "Tensors made by the ops so far, and scratch memory.");
  m.def(
      "fail_request", [](int number) { cuda_host_failing_request = number; },
      "Refuses memory to the request of this number, 0 for the next one; -1: to none.");
  m.def("memsets", [] { return cuda_host::memsets(); }, "Memsets on streams so far.");
  m.def("queries", &cuda_host::queries,
        "Queries of attributes of devices and kernels, and settings of kernels' attributes, so far.");
  m.def("plan", &cuda_host::plan, "How LaunchPlanner of csrc/cuda/plan.h divides an op.");
  m.def("set_device", [](int device) { cudaSetDevice(device); });
}
