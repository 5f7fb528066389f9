// The ops of CUDA, registered for CPU tensors as tests/cuda_host/redirect.py expects them; without other
// ranks, since the kernels that wait for them are not simulated.
#include <pybind11/pybind11.h>

#include "cuda/register.h"

PYBIND11_MODULE(_cuda_host, m) {
  m.doc() = "The kernels' PTX on GPGPU-Sim.";
}

STABLE_TORCH_LIBRARY_IMPL(fastvit_cuda_host, CPU, m) {
  fastvit::implement_ops(m);
}
