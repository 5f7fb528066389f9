// Happens-before race checking, in builds with CUDA_HOST_RACE (race.cpp). In others the functions do nothing.
#pragma once
#include <string>
#include <utility>

#include "cuda_runtime.h"
namespace cuda_host::race {
#ifdef CUDA_HOST_RACE
void begin();
int grid_begin(int threads, int dev, void* stream, bool early);  // returns the first thread's clock index
void wait(int id, int dev, void* stream);                        // until the previous grid has ended
void grid_end(int dev, void* stream);
int thread_begin(int base, int index, int lin, const std::string& block, char* stack, size_t stack_size);
void block_end(const int* ids, int n, int dev, void* stream);
// Thread `id`, or none if -1, is running; where its block has static and dynamic shared memory.
void running(int id, char* tls, size_t tls_size, char* dynamic, size_t dynamic_size);
void join(const int* ids, int n);  // barrier among these threads
void atomic(int id, const void* p, bool write, bool rmw, int order, int scope, size_t size, Loc at);
void forget(const void* p, size_t n);  // [p, p+n) is new memory
// Bytes of global memory that kernels have read and written so far. An atomic addition counts as a write.
std::pair<uint64_t, uint64_t> bytes();
#else
inline void begin() {}
inline int grid_begin(int, int, void*, bool) {
  return 0;
}
inline void wait(int, int, void*) {}
inline void grid_end(int, void*) {}
inline int thread_begin(int, int, int, const std::string&, char*, size_t) {
  return -1;
}
inline void block_end(const int*, int, int, void*) {}
inline void running(int, char*, size_t, char*, size_t) {}
inline void join(const int*, int) {}
inline void atomic(int, const void*, bool, bool, int, int, size_t, Loc) {}
inline void forget(const void*, size_t) {}
inline std::pair<uint64_t, uint64_t> bytes() {
  return {};
}
#endif
}  // namespace cuda_host::race
