// glibc: the one symbol that would need glibc 2.32, defined here for both libraries.
// libstdc++ reads it in every shared_ptr, such as that of torch::stable::Tensor, to leave out atomics in
// programs with one thread. 0 means that there may be others, which is always true.

extern "C" char __libc_single_threaded;
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
