// The CUDA runtime functions that the launchers and the driver call, answered by GPGPU-Sim through its own
// C++ interface. Kernels are found by the names that nvcc's host code registers, in files that ptx.py wrote.
//
// SIMULATE_PTX     folder with a file per kernel
// SIMULATE_TIMING  set: with the timing model, in which blocks run side by side; else block after block
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "gpgpu_context.h"
#include "simulated.h"

// What the simulator has from its own CUDA runtime, which is not built, and a switch of its parser.
gpgpu_context* GPGPU_Context() {
  static gpgpu_context context;
  return &context;
}
void register_ptx_function(const char*, function_info*) {}
void ptxinfo_data::ptxinfo_addinfo() {}
int ptx_debug = 0;

namespace {

constexpr int kRegisters = 128;  // of a thread: what the kernels' launch bound leaves each

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "simulate: %s\n", what.c_str());
  std::abort();
}

// Names of kernels by their host functions; static objects of the launchers fill it before main.
std::map<const void*, std::string>& registered_kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

class Simulator {
 public:
  static Simulator& get() {
    static Simulator simulator;
    return simulator;
  }

  gpgpu_t* memory() { return gpu; }

  void launch(const void* host, const cudaLaunchConfig_t& config, void** arguments) {
    const std::string& name = registered_kernels().at(host);
    function_info* const kernel = load(host, name);
    const size_t shared = kernel->get_symtab()->get_shared_next();
    if (config.dynamicSmemBytes > shared) fail(name + " asks for more shared memory than ptx.py gave it");
    gpgpu_ptx_sim_info info{};
    info.smem = int(shared);
    info.regs = kRegisters;
    kernel->set_kernel_info(info);
    gpgpu_ptx_sim_arg_list_t list;  // the last one first
    for (unsigned i = 0; i < kernel->num_args(); ++i) {
      const auto [size, offset] = kernel->get_param_config(i);
      list.push_front(gpgpu_ptx_sim_arg(arguments[i], size, offset));
    }
    kernel_info_t* const grid = simulator->func_sim->gpgpu_opencl_ptx_sim_init_grid(
        kernel, list, config.gridDim, config.blockDim, gpu);
    if (timing)
      simulator->gpgpu_opencl_ptx_sim_main_perf(grid);
    else
      simulator->func_sim->gpgpu_opencl_ptx_sim_main_func(grid);
  }

  const bool timing = std::getenv("SIMULATE_TIMING") != nullptr;
  size_t together = 0;  // launches whose blocks wait for each other
  size_t kernels_run() const { return kernels.size(); }

 private:
  Simulator() : simulator(GPGPU_Context()) {
    gpu = simulator->gpgpu_ptx_sim_init_perf();
    if (timing) simulator->start_sim_thread(2);
  }

  function_info* load(const void* host, const std::string& name) {
    function_info*& kernel = kernels[host];
    if (kernel) return kernel;
    const std::string file = std::string(std::getenv("SIMULATE_PTX")) + "/" + name + ".ptx";
    if (FILE* const there = std::fopen(file.c_str(), "r"))
      std::fclose(there);
    else
      fail("no " + file);
    symbol_table* const symbols = simulator->gpgpu_ptx_sim_load_ptx_from_filename(file.c_str());
    kernel = symbols->lookup(name.c_str())->get_pc();
    if (timing) {
      kernel->do_pdom();
      kernel->set_pdom();
    }
    return kernel;
  }

  gpgpu_context* const simulator;
  gpgpu_sim* gpu;
  std::map<const void*, function_info*> kernels;
};

}  // namespace

size_t simulated_kernels() {
  return Simulator::get().kernels_run();
}

size_t simulated_together() {
  return Simulator::get().together;
}

extern "C" {

// What nvcc's host code says of itself when the program starts.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
  return 0;
}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  registered_kernels()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
// Called by <<<>>> alone, which nothing here uses.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  fail("a kernel was launched by <<<>>>");
}
cudaError_t __cudaGetKernel(void**, const void*) {
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, void*) {
  fail("a kernel was launched by <<<>>>");
}

// Blocks that wait for each other must run side by side, which they do with the timing model alone.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const bool together = config->numAttrs > 0 && config->attrs->id == cudaLaunchAttributeCooperative;
  if (together && !Simulator::get().timing) return cudaErrorCooperativeLaunchTooLarge;
  Simulator::get().together += together;
  Simulator::get().launch(kernel, *config, arguments);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = Simulator::get().memory()->gpu_malloc(bytes);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void*) {  // the simulator never takes memory back
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (kind == cudaMemcpyHostToDevice)
    Simulator::get().memory()->memcpy_to_gpu(size_t(to), from, bytes);
  else if (kind == cudaMemcpyDeviceToHost)
    Simulator::get().memory()->memcpy_from_gpu(to, size_t(from), bytes);
  else
    return cudaErrorInvalidValue;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  Simulator::get().memory()->gpu_memset(size_t(data), value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = kSimulatedMultiprocessors;
  else if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor)
    *value = kSimulatedSharedBytes;
  else if (attribute == cudaDevAttrComputeCapabilityMajor)
    *value = 7;
  else
    return cudaErrorInvalidValue;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = 65536 / (kRegisters * threads);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of tools/simulate/runtime.cpp";
}
}
