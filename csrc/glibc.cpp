// Defines __libc_single_threaded for each library of the extension, _C.so and _cuda.so, so that it loads with
// a glibc before 2.32, which lacks this symbol.
//
// libstdc++'s shared_ptr, which torch::stable::Tensor has, reads the symbol to leave out atomics in a program
// with one thread. The value 0 means that there may be several threads, which is always a safe answer.

extern "C" char __libc_single_threaded;
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
