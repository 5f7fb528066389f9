// Holds the text on the build: for which GPUs the CUDA kernels were built, or why there are none, and a
// checksum of the sources. setup.py defines FASTVIT_BUILD_INFO. The text changes with each source, so it has
// a file of its own, which compiles in no time. tools/gpu_steps.py finds the checksum in the bytes of the
// library, without loading it.
#include "build_info.h"

const char fastvit::kBuildInfo[] = FASTVIT_BUILD_INFO;
