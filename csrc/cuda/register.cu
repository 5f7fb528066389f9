// The CUDA implementations of the ops, whose schemas stand in ops.cpp.
#include "backend.h"

STABLE_TORCH_LIBRARY_IMPL(fastvit, CUDA, m) {
  fastvit::Frontend<fastvit::Cuda>::implement(m);
}
