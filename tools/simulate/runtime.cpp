// The CUDA runtime functions that the launchers call, answered by GPGPU-Sim through its own C++ interface, in
// its functional mode: block after block. Kernels are found by the names that nvcc's host code registers, in
// the files of the folder SIMULATE_PTX, which ptx.py wrote. Names of those that ran are added to its file
// `ran`.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "gpgpu_context.h"

// What the simulator has from its own CUDA runtime, which is not built, and a switch of its parser.
gpgpu_context* GPGPU_Context() {
  static gpgpu_context context;
  return &context;
}
void register_ptx_function(const char*, function_info*) {}
void ptxinfo_data::ptxinfo_addinfo() {}
int ptx_debug = 0;

namespace {

// The GPU that the planner is told of.
constexpr int kMultiprocessors = 16;
constexpr int kSharedBytes = 228 << 10;  // of a multiprocessor, as an H200's
constexpr int kRegisters = 128;          // of a thread: what the kernels' launch bound leaves each

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "simulate: %s\n", what.c_str());
  std::abort();
}

// Names of kernels by their host functions; static objects of the launchers fill it before main.
std::map<const void*, std::string>& registered_kernels() {
  static std::map<const void*, std::string> names;
  return names;
}

// The simulated global memory is that of this process, so kernels read and write torch's CPU tensors.
class HostMemory : public memory_space {
  void write(mem_addr_t to, size_t bytes, const void* from, ptx_thread_info*,
             const ptx_instruction*) override {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  }
  void read(mem_addr_t from, size_t bytes, void* to) const override {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  }
  void write_only(mem_addr_t, mem_addr_t, size_t, const void*) override { fail("a page is written"); }
  void print(const char*, FILE*) const override {}
  void set_watch(addr_t, unsigned) override {}
};
struct GlobalMemory : gpgpu_t {
  static constexpr auto member = &GlobalMemory::m_global_mem;  // protected there
};

class Simulator {
 public:
  static Simulator& get() {
    static Simulator simulator;
    return simulator;
  }

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
    simulator->func_sim->gpgpu_opencl_ptx_sim_main_func(grid);
  }

 private:
  Simulator() : simulator(GPGPU_Context()), gpu(simulator->gpgpu_ptx_sim_init_perf()) {
    gpu->*GlobalMemory::member = new HostMemory;
  }

  function_info* load(const void* host, const std::string& name) {
    function_info*& kernel = kernels[host];
    if (kernel) return kernel;
    const std::string folder = std::getenv("SIMULATE_PTX"), file = folder + "/" + name + ".ptx";
    FILE* const there = std::fopen(file.c_str(), "r");
    if (!there) fail("no " + file);
    std::fclose(there);
    FILE* const ran = std::fopen((folder + "/ran").c_str(), "a");
    std::fprintf(ran, "%s\n", name.c_str());
    std::fclose(ran);
    kernel = simulator->gpgpu_ptx_sim_load_ptx_from_filename(file.c_str())->lookup(name.c_str())->get_pc();
    return kernel;
  }

  gpgpu_context* const simulator;
  gpgpu_sim* const gpu;
  std::map<const void*, function_info*> kernels;
};

}  // namespace

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

// Blocks that wait for each other must run side by side, which they do not.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  if (config->numAttrs > 0 && config->attrs->id == cudaLaunchAttributeCooperative)
    return cudaErrorCooperativeLaunchTooLarge;
  Simulator::get().launch(kernel, *config, arguments);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = kMultiprocessors;
  else if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor)
    *value = kSharedBytes;
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
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = 70;
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
