// For which GPUs the CUDA kernels were built, or why there are none; and a checksum of the sources. setup.py
// defines FASTVIT_BUILD_INFO, which changes with each source, so it is compiled in a file of its own.
// tools/gpu_steps.py finds the checksum in the bytes of the library, without loading it.
#include "build_info.h"

const char fastvit::build_info[] = FASTVIT_BUILD_INFO;
