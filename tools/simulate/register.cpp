// The ops of CUDA, registered for CPU tensors as tests/cuda_host/redirect.py expects them.
#include <pybind11/pybind11.h>

#include "act.h"
#include "backward.h"
#include "cuda/backend.h"
#include "forward.h"
#include "layer_norm.h"
#include "reduce.h"
#include "stats.h"

PYBIND11_MODULE(_cuda_host, m) {
  m.doc() = "The kernels' PTX on GPGPU-Sim.";
}

STABLE_TORCH_LIBRARY_IMPL(fastvit_cuda_host, CPU, m) {
  fastvit::StatsOps<fastvit::Cuda>::implement(m);
  fastvit::ForwardOps<fastvit::Cuda>::implement(m);
  fastvit::ReduceOps<fastvit::Cuda>::implement(m);
  fastvit::BackwardOps<fastvit::Cuda>::implement(m);
  fastvit::LayerNormOps<fastvit::Cuda>::implement(m);
  fastvit::ActOps<fastvit::Cuda>::implement(m);
}
