// Happens-before data race checker for emulated kernels. Kernels are compiled with -fsanitize=thread. This
// file implements the __tsan_* functions in place of libtsan, with CUDA's rules: __syncthreads orders memory;
// shuffles do not; other blocks and GPUs are ordered only by release/acquire of sufficient scope. Reports do
// not depend on the schedule: a missing barrier is reported even when the result is right.
//
// Grids never overlap here. One that begins early has, until it waits, the clock with which the grid before
// it began: every access of that grid is concurrent. The trigger orders no memory. Accesses of the run before
// are those of thread 0, since a synchronous launch is a run of its own.
#include "race.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_host {
std::string current_thread(), text(Loc);
[[noreturn]] void fail_here(const std::string&);

namespace race {
namespace {
using Clock = std::vector<uint32_t>;  // by thread index; absent entries are 0
using Shared = std::shared_ptr<const Clock>;
struct Thread {
  Shared base;
  uint32_t own = 0;
  int dev = 0, block = 0;
  bool has_waited = false;  // for the previous kernel
};
struct Cell {
  uint32_t id[3], clk[3], pc[3];
};  // [0] last write, [1], [2] reads since; id: thread + 1, top bit: atomic
struct Site {
  int dev;
  Clock gpu, sys;
};  // clocks of the releases on a flag, by releasing GPU and scope
struct Stream {
  Clock ended{1}, ending;  // joined at the end of each grid, with thread 0's accesses; of each block
  Shared early = std::make_shared<const Clock>();  // with which the latest grid begins
  Shared waited;                                   // what its threads get when they wait
};
constexpr uint32_t kAtomic = 1u << 31;

std::vector<Thread> th;
std::unordered_map<uint64_t, std::unique_ptr<Cell[]>> shadow;
std::unordered_map<uint64_t, std::vector<Site>> flags;
std::map<std::pair<int, void*>, Stream> streams;
uint64_t page_no = ~0ull;
Cell* page = nullptr;
int me = -1;
uintptr_t stack_lo = 0, tls_lo = 0, tls_size = 0, dynamic_lo = 0, dynamic_size = 0, pc_base = 0;
uint64_t bytes_read = 0, bytes_written = 0;
std::vector<Loc> sites;
std::vector<std::string> block_name;
std::vector<uintptr_t> stack_of;
size_t stack_size = 0;

void join_into(Clock& a, const Clock& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); ++i) a[i] = std::max(a[i], b[i]);
}
uint32_t seen(const Thread& t, uint32_t other) {
  return other < t.base->size() ? (*t.base)[other] : 0;
}
Clock snapshot(int id) {
  Clock c = *th[id].base;
  if (c.size() <= size_t(id)) c.resize(id + 1);
  c[id] = th[id].own;
  return c;
}
// __shared__ variables have one address for all blocks, so their key contains the block.
uint64_t key(uintptr_t p) {
  return p - tls_lo < tls_size ? (uint64_t(th[me].block + 1) << 40 | 1ull << 63) + (p - tls_lo) : p;
}
std::string line_of(uint32_t pc) {
  if (pc & kAtomic) return text(sites[pc & ~kAtomic]);
  Dl_info i{};
  if (!dladdr((void*)(pc_base + pc), &i)) return "?";
  char cmd[600], out[300] = "";
  snprintf(cmd, sizeof cmd, "addr2line -e '%s' 0x%zx 2>/dev/null", i.dli_fname,
           size_t(pc_base + pc - (uintptr_t)i.dli_fbase - 1));
  if (FILE* f = popen(cmd, "r")) {
    if (!fgets(out, sizeof out, f)) out[0] = 0;
    pclose(f);
  }
  std::string s = out;
  s = s.substr(0, s.find_first_of(" \n"));
  return s.substr(s.rfind('/') + 1);
}
uint32_t site_of(Loc at) {  // of an atomic; a plain access has only its pc
  auto i =
      std::find_if(sites.begin(), sites.end(), [&](Loc l) { return l.file == at.file && l.line == at.line; });
  if (i == sites.end()) i = sites.insert(i, at);
  return kAtomic | uint32_t(i - sites.begin());
}
// Whether p is neither in shared memory nor in a variable that is a register on a GPU.
bool is_global(uintptr_t p) {
  for (const auto* index : {&threadIdx, &blockIdx})
    if (p - (uintptr_t)index < sizeof *index) return false;
  for (const auto* size : {&blockDim, &gridDim})
    if (p - (uintptr_t)size < sizeof *size) return false;
  return p - tls_lo >= tls_size && p - dynamic_lo >= dynamic_size;
}
void access(uintptr_t p, size_t n, bool write, bool atomic, uint32_t my_pc) {
  if (me < 0 || p - stack_lo < stack_size) return;
  Thread& t = th[me];
  // Before it waits, a thread only reads where the engine keeps the kernel.
  if (t.has_waited && is_global(p)) (write ? bytes_written : bytes_read) += n;
  if (!config().checks_races) return;
  uint64_t k = key(p);
  const uint32_t self = uint32_t(me);
  for (size_t b = 0; b < n; ++b, ++k) {
    if (k >> 10 != page_no) {
      auto& q = shadow[k >> 10];
      if (!q) q.reset(new Cell[1024]());
      page_no = k >> 10, page = q.get();
    }
    Cell& c = page[k & 1023];
    for (int i = 0; i < (write ? 3 : 1); ++i) {
      uint32_t o = (c.id[i] & ~kAtomic) - 1;
      if (!c.id[i] || o == self || (atomic && (c.id[i] & kAtomic)) || seen(t, o) >= c.clk[i]) continue;
      const char* kind[] = {"reads", "writes", "atomically reads", "atomically writes"};
      fail_here("data race: " + current_thread() + " " + kind[write + 2 * atomic] + " at " + line_of(my_pc) +
                " what " + (o ? "thread " + std::to_string(o - uint32_t(th[o].block)) : "a thread") +
                (!o ? " of an earlier launch"
                 : th[o].block == t.block
                     ? " of its block"
                     : " of gpu " + std::to_string(th[o].dev) + " block " + block_name[th[o].block]) +
                " " + kind[(i == 0) + 2 * !!(c.id[i] & kAtomic)] + " at " + line_of(c.pc[i]) + ", unordered" +
                (p - tls_lo < tls_size ? " (static shared memory)" : ""));
    }
    int i = write ? 0
            : (!c.id[1] || (c.id[1] & ~kAtomic) - 1 == self || seen(t, (c.id[1] & ~kAtomic) - 1) >= c.clk[1])
                ? 1
                : 2;
    if (write) c.id[1] = c.id[2] = 0;
    c.id[i] = (self + 1) | (atomic ? kAtomic : 0), c.clk[i] = t.own, c.pc[i] = my_pc;
  }
}
}  // namespace

void begin() {
  if (th.size() == 1) return;  // no grid has run since
  std::erase_if(shadow, [](auto& page_of) {
    bool used = false;
    for (Cell* c = page_of.second.get(); c < page_of.second.get() + 1024; ++c)
      for (int i = 0; i < 3; ++i) {
        const bool latest = (c->id[i] & ~kAtomic) > 1;  // thread 0's accesses are of the run before
        c->id[i] = latest ? 1 | (c->id[i] & kAtomic) : 0, c->clk[i] = 1;
        used |= latest;
      }
    return !used || page_of.first >> 53;  // static shared memory
  });
  th.assign(1, {}), stack_of.assign(1, 0), block_name.assign(1, "");
  flags.clear(), streams.clear(), page_no = ~0ull, me = -1;
}
int grid_begin(int threads, int dev, void* stream, bool early) {
  int base = int(th.size());
  Stream& s = streams[{dev, stream}];
  s.waited = std::make_shared<const Clock>(s.ended);
  if (!early) s.early = s.waited;
  th.resize(base + threads);
  stack_of.resize(base + threads), block_name.resize(base + threads);
  for (int i = base; i < base + threads; ++i) th[i].base = s.early, th[i].own = 1, th[i].dev = dev;
  return base;
}
int thread_begin(int base, int index, int lin, const std::string& block, char* stack, size_t size) {
  int id = base + index;
  if (!lin) block_name[id] = block;
  th[id].block = id - lin, stack_of[id] = (uintptr_t)stack, stack_size = size;
  return id;
}
void block_end(const int* ids, int n, int dev, void* stream) {
  if (!config().checks_races) return;
  join(ids, n);
  join_into(streams[{dev, stream}].ending, *th[ids[0]].base);
  for (int i = 0; i < n; ++i) th[ids[i]].base.reset();
}
void grid_end(int dev, void* stream) {
  Stream& s = streams[{dev, stream}];
  join_into(s.ended, s.ending);
}
void wait(int id, int dev, void* stream) {
  const Stream& s = streams[{dev, stream}];
  th[id].has_waited = true;
  if (th[id].base == s.early) {
    th[id].base = s.waited;
    return;
  }
  auto c = std::make_shared<Clock>(*th[id].base);
  join_into(*c, *s.waited);
  th[id].base = c;
}
void running(int id, char* tls, size_t n, char* dynamic, size_t dynamic_n) {
  me = id, tls_lo = (uintptr_t)tls, tls_size = n;
  dynamic_lo = (uintptr_t)dynamic, dynamic_size = dynamic ? dynamic_n : 0;
  stack_lo = id < 0 ? 0 : stack_of[id];
}
std::pair<uint64_t, uint64_t> bytes() {
  return {bytes_read, bytes_written};
}
void join(const int* ids, int n) {
  if (!config().checks_races) return;
  auto c = std::make_shared<Clock>(*th[ids[0]].base);
  const Clock* last = th[ids[0]].base.get();
  for (int i = 0; i < n; ++i)
    if (th[ids[i]].base.get() != last) last = th[ids[i]].base.get(), join_into(*c, *last);
  for (int i = 0; i < n; ++i) {
    if (c->size() <= size_t(ids[i])) c->resize(ids[i] + 1);
    (*c)[ids[i]] = std::max((*c)[ids[i]], th[ids[i]].own++);
  }
  for (int i = 0; i < n; ++i) th[ids[i]].base = c;
}
void atomic(int id, const void* p, bool write, bool rmw, int order, int scope, size_t size, Loc at) {
  access((uintptr_t)p, size, write, true, site_of(at));
  if (!config().checks_races) return;
  Thread& t = th[id];
  auto& s = flags[key((uintptr_t)p)];
  if ((!write || rmw) && order & acquire) {
    auto c = std::make_shared<Clock>(*t.base);
    for (auto& e : s) {
      if (e.dev == t.dev) join_into(*c, e.gpu);
      if (e.dev == t.dev || scope == sys) join_into(*c, e.sys);
    }
    t.base = c;
  }
  if (write) {
    if (!rmw) s.clear();
    auto e = std::find_if(s.begin(), s.end(), [&](Site& x) { return x.dev == t.dev; });
    if (e == s.end()) s.push_back({t.dev, {}, {}}), e = s.end() - 1;
    if (order & release) {
      join_into(scope == sys ? e->sys : e->gpu, snapshot(id));
      ++t.own;
    }
  }
}
void forget(const void* p, size_t n) {
  page_no = ~0ull;
  for (uint64_t a = (uintptr_t)p; a < (uintptr_t)p + n; ++a) {
    auto q = shadow.find(a >> 10);
    if (q != shadow.end()) q->second[a & 1023] = Cell();
  }
}
}  // namespace race
}  // namespace cuda_host

// ---- called by kernels compiled with -fsanitize=thread ----
using namespace cuda_host::race;
#define PC uint32_t((uintptr_t)__builtin_return_address(0) - pc_base)
#define ACCESS(N)                                      \
  extern "C" void __tsan_read##N(void* p) {            \
    access((uintptr_t)p, N, false, false, PC);         \
  }                                                    \
  extern "C" void __tsan_write##N(void* p) {           \
    access((uintptr_t)p, N, true, false, PC);          \
  }                                                    \
  extern "C" void __tsan_unaligned_read##N(void* p) {  \
    access((uintptr_t)p, N, false, false, PC);         \
  }                                                    \
  extern "C" void __tsan_unaligned_write##N(void* p) { \
    access((uintptr_t)p, N, true, false, PC);          \
  }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16) extern "C" void __tsan_read_range(void* p, size_t n) {
  access((uintptr_t)p, n, false, false, PC);
}
extern "C" void __tsan_write_range(void* p, size_t n) {
  access((uintptr_t)p, n, true, false, PC);
}
extern "C" void __tsan_init() {
  pc_base = (uintptr_t)&__tsan_init - 0x40000000;
}  // 31-bit offsets reach this module
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
// std::atomic in host code (torch's reference counts): plain hardware atomics
#define RMW(B, T, OP)                                             \
  extern "C" T __tsan_atomic##B##_##OP(volatile T* p, T v, int) { \
    return __atomic_##OP(p, v, __ATOMIC_SEQ_CST);                 \
  }
#define ATOMICS(B, T)                                                                             \
  extern "C" T __tsan_atomic##B##_load(const volatile T* p, int) {                                \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                               \
  extern "C" void __tsan_atomic##B##_store(volatile T* p, T v, int) {                             \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                     \
  }                                                                                               \
  extern "C" T __tsan_atomic##B##_exchange(volatile T* p, T v, int) {                             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                           \
  }                                                                                               \
  extern "C" int __tsan_atomic##B##_compare_exchange_strong(volatile T* p, T* e, T v, int, int) { \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
  }                                                                                               \
  extern "C" int __tsan_atomic##B##_compare_exchange_weak(volatile T* p, T* e, T v, int, int) {   \
    return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
  }                                                                                               \
  RMW(B, T, fetch_add) RMW(B, T, fetch_sub) RMW(B, T, fetch_and) RMW(B, T, fetch_or) RMW(B, T, fetch_xor)
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t) ATOMICS(64, uint64_t) extern "C" void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
extern "C" void __tsan_atomic_signal_fence(int) {}
