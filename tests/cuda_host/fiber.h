// Fibers: one per emulated CUDA thread, switched by hand (x86-64) or by ucontext. Part of engine.cpp.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) && !defined(CUDA_HOST_UCONTEXT)
#define CUDA_HOST_UCONTEXT
#endif
#ifdef CUDA_HOST_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda_host {
namespace {
constexpr size_t kPage = 4096;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 256 * 1024;
#else
constexpr size_t kStack = 64 * 1024;
#endif

struct Fiber {
  void *sp = nullptr, *fake = nullptr;
  const void* lo = nullptr;
  size_t size = 0;
#ifdef CUDA_HOST_UCONTEXT
  ucontext_t uc;
#endif
};
#ifndef CUDA_HOST_UCONTEXT
extern "C" void cuda_host_switch(void** save, void* load);
asm(".text\n.type cuda_host_switch,@function\n.hidden cuda_host_switch\n.globl "
    "cuda_host_switch\ncuda_host_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp,(%rdi)\n  mov %rsi,%rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n  ret\n"
    ".size cuda_host_switch,.-cuda_host_switch\n");
#endif
void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool dying = false) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(dying ? nullptr : &from.fake, to.lo, to.size);
#endif
#ifdef CUDA_HOST_UCONTEXT
  swapcontext(&from.uc, &to.uc);
#else
  cuda_host_switch(&from.sp, to.sp);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}
std::vector<char*> stack_pool;
char* get_stack() {
  if (stack_pool.empty()) {
    char* p = (char*)mmap(nullptr, kStack + kPage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mprotect(p, kPage,
             PROT_NONE);  // a fiber that overflows its stack crashes here instead of corrupting a neighbour
    return p + kPage;
  }
  char* p = stack_pool.back();
  stack_pool.pop_back();
  return p;
}

}  // namespace
}  // namespace cuda_host
