// What GPGPU-Sim's sources take from elsewhere and do not find: CUDA 12 removed texture references from its
// headers, and MAX comes from the power model, which is not built.
#pragma once

#include <builtin_types.h>

struct textureReference {
  int normalized;
  cudaTextureFilterMode filterMode;
  cudaTextureAddressMode addressMode[3];
  cudaChannelFormatDesc channelDesc;
};

#define MAX(a, b) (((a) > (b)) ? (a) : (b))
