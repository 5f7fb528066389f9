// The engine of the test-only cuda_runtime.h, which schedules launches, blocks and threads. One OS thread
// runs everything. One mutex, taken in launch() and run(), guards all state.
#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <set>

#include "block.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_host {
namespace {
void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &main_fiber.lo, &main_fiber.size);
#endif
  try {
    cur->b->g->body();
  } catch (const std::exception& e) {
    die("exception in " + where(*cur) + ": " + e.what());
  }
  cur->st = St::done;
  switch_fiber(cur->f, main_fiber, true);
  __builtin_unreachable();
}
void load(Block* b) {  // put b's static __shared__ variables in place
  if (loaded == b || !b->g->tls_size) return;
  if (loaded) memcpy(loaded->shared.data(), loaded->g->tls, loaded->g->tls_size);
  memcpy(b->g->tls, b->shared.data(), b->g->tls_size);
  loaded = b;
}
void start_block(Grid* g) {
  unsigned lin = g->order[g->next++], n = g->block.x * g->block.y * g->block.z;
  std::unique_ptr<Block> b;
  if (spare.empty())
    b = std::make_unique<Block>();
  else
    b = std::move(spare.back()), spare.pop_back();
  b->g = g, b->id = {lin % g->grid.x, lin / g->grid.x % g->grid.y, lin / g->grid.x / g->grid.y};
  b->shared.assign(g->tls_size,
                   char(0xff));  // 0xff..: NaN in half, bfloat16, float and double; -1 in integers
  b->dyn = g->smem ? (char*)aligned_alloc(128, (g->smem + 127) / 128 * 128) : nullptr;
#ifdef __SANITIZE_ADDRESS__
  if (b->dyn)
    free(b->dyn), posix_memalign((void**)&b->dyn, 128, g->smem);  // exact size: red zone right behind
#endif
  if (b->dyn) memset(b->dyn, 0xff, g->smem), race::forget(b->dyn, g->smem);
  b->ready.clear(), b->head = 0, b->live = int(n), b->waiting = 0, b->triggered = false;
  for (int w = 0; w < 32; ++w) b->warp_wait[w] = b->warp_done[w] = 0;
  for (size_t i = n; i < b->th.size(); ++i) stack_pool.push_back(b->th[i].stack);
  b->th.resize(n);
  for (unsigned i = 0; i < n; ++i) {
    Thread& t = b->th[i];
    char* stack = t.stack;
    t = Thread();
    t.stack = stack ? stack : get_stack();
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(t.stack + kStack - kPage,
                                  kPage);  // fiber_main never returns: its red zones stay
#endif
    t.b = b.get(), t.lin = int(i);
    t.tid = {i % g->block.x, i / g->block.x % g->block.y, i / g->block.x / g->block.y};
    t.race_id = race::thread_begin(g->race_base, int(lin * n + i), int(i), str(b->id), t.stack, kStack);
    t.f.lo = t.stack, t.f.size = kStack;
#ifdef CUDA_HOST_UCONTEXT
    getcontext(&t.f.uc);
    t.f.uc.uc_stack.ss_sp = t.stack, t.f.uc.uc_stack.ss_size = kStack, t.f.uc.uc_link = nullptr;
    makecontext(&t.f.uc, fiber_main, 0);
#else
    auto* sp =
        (void**)(t.stack + kStack - (i % 32) * 64);  // offsets, since equal tops would share cache sets
    *--sp = nullptr;  // return address of fiber_main; leaves rsp % 16 == 8 at its entry, as the ABI wants
    *--sp = (void*)fiber_main;
    sp -= 6;
    std::fill(sp, sp + 6, nullptr);
    t.f.sp = sp;
#endif
    b->ready.push_back(int(i));
  }
  active.push_back(std::move(b));
}
void end_block(size_t i) {
  std::unique_ptr<Block> b = std::move(active[i]);
  active.erase(active.begin() + long(i));
  if (loaded == b.get()) loaded = nullptr;
  free(b->dyn);
  scratch.clear();
  for (auto& t : b->th) scratch.push_back(t.race_id);
  race::block_end(scratch.data(), int(scratch.size()), b->g->dev, (void*)b->g->stream);
  spare.push_back(std::move(b));
}
void step(Block& b) {  // run one ready thread of b until it waits, polls or exits
  if (config().seed) {
    size_t best = b.head + rnd(b.ready.size() - b.head);
    auto rank = [&](size_t i) {
      return (uint64_t(b.ready[i] / 32 + 1) * 0x9e3779b97f4a7c15u ^ config().seed * 0xbf58476d1ce4e5b9u) *
                 0x94d049bb133111ebu >>
             40;
    };
    if (config().seed % 2 ==
        0)  // even seeds: some warps run ahead of the others all the time; odd seeds: uniform
      for (int k = 0; k < 8; ++k) {
        size_t i = b.head + rnd(b.ready.size() - b.head);
        if (rank(i) > rank(best)) best = i;
      }
    std::swap(b.ready[b.head], b.ready[best]);
  }
  Thread& t = b.th[size_t(b.ready[b.head++])];
  if (b.head == b.ready.size()) b.ready.clear(), b.head = 0;
  load(&b);
  cur = &t, ++n_steps;
  threadIdx = t.tid, blockIdx = b.id, blockDim = b.g->block, gridDim = b.g->grid;
  race::running(t.race_id, b.g->tls, b.g->tls_size, b.dyn, b.g->smem);
  switch_fiber(main_fiber, t.f);
  race::running(-1, nullptr, 0, nullptr, 0);
  cur = nullptr;
  if (!error.empty()) throw std::runtime_error(error);
  if (t.st == St::ready) {  // polled or gave up its turn
    b.ready.push_back(t.lin);
    return;
  }
  t.n_polls = 0, progress = n_steps;
  if (t.st == St::at_barrier)
    ++b.waiting, try_barrier(b);
  else if (t.st == St::at_warp)
    b.warp_wait[t.lin / 32] |= 1u << t.lin % 32, try_warp(b, t);
  else
    --b.live, exit_warp(b, t), try_barrier(b);
}
void reset() {
  loaded = nullptr, cur = nullptr, error.clear();
  while (!active.empty()) {
    for ([[maybe_unused]] auto& t : active.back()->th) {
#ifdef __SANITIZE_ADDRESS__
      __asan_unpoison_memory_region(t.stack, kStack);  // abandoned frames left red zones
#endif
    }
    end_block(active.size() - 1);
  }
}
void prepare(Grid& g) {
  g.order.resize(size_t(g.grid.x) * g.grid.y * g.grid.z);
  for (unsigned i = 0; i < g.order.size(); ++i) g.order[i] = i;
  if (config().seed) std::shuffle(g.order.begin(), g.order.end(), rng);
  g.race_base = race::grid_begin(int(g.order.size() * g.block.x * g.block.y * g.block.z), g.dev,
                                 (void*)g.stream, g.early);
  race::forget(&g.body, sizeof g.body);  // which every thread reads; a kernel may have written to the address
}
std::set<std::string> kernel_names;
size_t places_left(int dev) {
  const auto taken = std::count_if(active.begin(), active.end(), [&](auto& b) { return b->g->dev == dev; });
  return size_t(std::max<long>(0, config().resident - long(taken)));
}
void run_all() {
  rng.seed(config().seed);
  race::begin();
  std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Grid>> running;
  progress = n_steps;
  uint64_t clock_reads_before = n_clock_reads;
  int leaps = 0;
  size_t rr = 0;
  for (;;) {
    for (auto& [key, q] : queues) {  // start what can start
      auto& g = running[key];
      size_t mine = 0;
      for (auto& b : active) mine += g && b->g == g.get();
      if (g && !mine && g->next == g->order.size()) {
        if (g->early && !g->waited)  // it could end before kernels for which the next kernel does not wait
          throw std::runtime_error(g->name + " begins early and never waits for the previous kernel");
        race::grid_end(key.first, (void*)key.second), g.reset(), progress = n_steps;
      }
      while (!g && !q.empty()) {
        Work w = std::move(q.front());
        q.pop_front();
        if (w.host_op)
          w.host_op();
        else
          g = std::move(w.g), prepare(*g), rr = 0;
      }
      size_t resident = !g                  ? 0
                        : g->coop           ? g->order.size()
                        : config().resident ? mine + places_left(key.first)
                        : config().seed     ? 3
                                            : 1;  // only cooperative grids are co-resident
      for (; mine < resident && g->next < g->order.size(); ++mine) start_block(g.get()), progress = n_steps;
    }
    if (active.empty()) break;
    rr = config().seed ? rnd(active.size()) : (rr + 1) % active.size();
    Block& b = *active[rr];
    size_t quantum = config().seed ? 1 + rnd(4 * b.th.size()) : b.th.size();
    for (size_t k = 0, spins = 0; k < quantum && b.head < b.ready.size(); ++k) {
      uint64_t before = progress;
      step(b);
      spins = progress == before ? spins + 1 : 0;
      if (spins > b.ready.size() - b.head) break;  // only spinning threads here: another block's turn
    }
    if (!b.live) {
      end_block(rr);
      rr = 0;
      continue;
    }
    size_t pollers = 0;
    for (auto& x : active) pollers += x->ready.size() - x->head;
    bool dead = pollers == 0;
    uint64_t idle = n_steps - progress;
    if (!dead && idle > 64 * pollers + 4096) {  // no thread did anything but re-read unchanged flags
      if (n_clock_reads != clock_reads_before && leaps < kMostLeaps) {  // they wait with a timeout
        clock_reads_before = n_clock_reads, ++leaps, leapt += kLeap, progress = n_steps;
      } else
        dead = true;
    }
    if (dead) {
      std::string s = "deadlock: no thread can make progress (seed " + std::to_string(config().seed) + ")";
      for (auto& x : active)
        s += "\n  " + x->g->name + " gpu " + std::to_string(x->g->dev) + " block " + str(x->id) + ":" +
             describe(*x);
      for (auto& [key, g] : running)
        if (g && g->next < g->order.size())
          s += "\n  " + g->name + ": " + std::to_string(g->order.size() - g->next) +
               " block(s) not started (not a cooperative launch, or no room)";
      throw std::runtime_error(s);
    }
  }
}
struct TlsQuery {
  const void* fn;
  size_t mod, size;
};
int find_tls(dl_phdr_info* i, size_t, void* p) {
  auto& q = *(TlsQuery*)p;
  bool mine = false;
  size_t size = 0;
  for (int k = 0; k < i->dlpi_phnum; ++k) {
    auto& h = i->dlpi_phdr[k];
    if (h.p_type == PT_LOAD && uintptr_t(q.fn) - (i->dlpi_addr + h.p_vaddr) < h.p_memsz) mine = true;
    if (h.p_type == PT_TLS) size = h.p_memsz;
  }
  if (mine) q.mod = i->dlpi_tls_modid, q.size = size;
  return mine;
}
extern "C" void* __tls_get_addr(size_t*);
}  // namespace

Config& config() {
  static Config c;
  return c;
}
uint64_t steps() {
  return n_steps;
}
uint64_t launches() {
  return n_launches;
}
uint64_t queries() {
  return n_queries;
}
uint64_t& memsets() {
  static uint64_t so_far = 0;
  return so_far;
}

std::pair<uint64_t, uint64_t> bytes() {
  return race::bytes();
}
uint64_t blocks() {
  return n_blocks;
}
std::set<std::string> kernels() {
  return std::exchange(kernel_names, {});
}
uint64_t globaltimer() {
  ++n_clock_reads;
  return n_steps + leapt;
}
void wait_for_previous_kernel() {
  Grid& g = *cur->b->g;
  g.waited = true;
  race::wait(cur->race_id, g.dev, (void*)g.stream);
}
void let_next_kernel_begin() {
  cur->b->triggered = true;
}
void* dynamic_shared() {
  return cur->b->dyn;
}
unsigned lane() {
  return unsigned(cur->lin) % 32;
}
void fail(const char* what, Loc at) {
  die(std::string(what) + " in " + where(*cur) + " at " + str(at));
}
std::string current_thread() {
  return where(*cur);
}
std::string text(Loc at) {
  return str(at);
}
void fail_here(const std::string& s) {
  die(s);
}

int block_barrier(Op op, int pred, Loc at) {
  cur->op = op, cur->pred = pred, cur->at = at, cur->st = St::at_barrier;
  back_to_scheduler();
  return int(cur->res);
}
uint64_t shuffle(unsigned mask, uint64_t value, int src, Loc at) {
  int n = std::min<int>(32, int(cur->b->th.size()) - cur->lin / 32 * 32);
  if (!(mask >> lane() & 1)) fail("calling lane is not in the mask of a warp operation", at);
  if (n < 32 && mask >> n) fail("mask of a warp operation names lanes beyond blockDim", at);
  cur->op = Op::shfl, cur->mask = mask, cur->val = value, cur->src = src, cur->at = at, cur->st = St::at_warp;
  back_to_scheduler();
  return cur->res;
}
void atomic_pre(Loc at) {
  if (cur) cur->at = at;
  if (cur && config().seed && rnd(4) == 0) back_to_scheduler();
}
static void poll(const void* p, uint64_t seen) {  // yields if it has read this value before
  unsigned i = 0, n = std::min(cur->n_polls, kPolls);
  while (i < n && cur->polls[i].at != p) ++i;
  if (i < n && cur->polls[i].seen == seen) {  // it spins
    cur->idle = true;
    back_to_scheduler();
    cur->idle = false;
  } else {
    if (i == n) i = cur->n_polls++ % kPolls;
    cur->polls[i] = {p, seen}, progress = n_steps;
  }
}
void atomic_post(const void* p, uint64_t seen, size_t size, bool wrote, bool is_rmw, int order, int scope,
                 Loc at) {
  if (!cur) return;
  // The blocks of two grids that wait for other GPUs may leave no room for a kernel that the others need.
  if (!wrote && !is_rmw && scope == sys && cur->b->triggered)
    fail("a block that let the next kernel begin waits for other GPUs,", at);
  race::atomic(cur->race_id, p, wrote || is_rmw, is_rmw, order, scope, size, at);
  if (wrote)
    cur->n_polls = 0, progress = n_steps;
  else
    poll(p, seen);
}
void enqueue(cudaStream_t s, std::function<void()> f) {
  std::lock_guard lock(mtx);
  queues[{device, s}].push_back({nullptr, std::move(f)});
  if (!config().deferred) run();
}
void run() {
  std::lock_guard lock(mtx);
  if (cur) return;
  std::map<char*, std::vector<char>> host;  // the caller's thread-local variables, which blocks overwrite
  for (const auto& [key, queue] : queues)
    for (const Work& w : queue)
      if (w.g && w.g->tls && host[w.g->tls].empty())
        host[w.g->tls].assign(w.g->tls, w.g->tls + w.g->tls_size);
  const auto restore = [&] {
    for (const auto& [tls, image] : host) memcpy(tls, image.data(), image.size());
  };
  try {
    run_all();
  } catch (const std::exception& e) {
    std::string s = std::string("cuda_host: ") + e.what();
    reset();
    queues.clear();
    restore();
    throw std::runtime_error(s);
  }
  restore();
}
cudaError_t launch(const cudaLaunchConfig_t& c, const void* fn, std::function<void()> body) {
  std::lock_guard lock(mtx);
  if (cur) fail("kernel launch from a kernel", {"?", 0});
  auto g = std::make_unique<Grid>();
  Dl_info info{};
  if (dladdr(fn, &info) && info.dli_saddr == fn && info.dli_sname) {
    int st;
    char* d = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &st);
    g->name = d ? d : info.dli_sname;
    free(d);
    size_t sp = g->name.find(' '), pa = g->name.find('('),
           lt = g->name.find('<');  // "void k<float>(...)" -> "k<float>"
    g->name = g->name.substr(0, pa);
    if (sp < std::min(lt, pa)) g->name = g->name.substr(sp + 1);
  } else
    g->name = "kernel@" + std::to_string((uintptr_t)fn);
  g->grid = c.gridDim, g->block = c.blockDim, g->smem = c.dynamicSmemBytes, g->dev = device,
  g->stream = c.stream, g->body = std::move(body);
  for (unsigned i = 0; i < c.numAttrs; ++i)
    if (c.attrs[i].id == cudaLaunchAttributeCooperative)
      g->coop = c.attrs[i].val.cooperative;
    else
      g->early = c.attrs[i].val.programmaticStreamSerializationAllowed;
  size_t n = size_t(g->block.x) * g->block.y * g->block.z, blocks = size_t(g->grid.x) * g->grid.y * g->grid.z;
  TlsQuery q{fn, 0, 0};
  dl_iterate_phdr(find_tls, &q);
  if (q.size) {
    size_t ti[2] = {q.mod, 0};
    g->tls = (char*)__tls_get_addr(ti), g->tls_size = q.size;
  }
  int asked;
  cudaGetDevice(&asked);
  const auto allowed = smem_limit.find({fn, asked});
  size_t limit = allowed == smem_limit.end() ? 48 * 1024 : size_t(allowed->second);
  if (!n || n > 1024 || g->block.z > 64 || !blocks || g->grid.y > 65535 || g->grid.z > 65535 ||
      g->smem > limit)
    return cudaErrorInvalidConfiguration;
  const size_t resident =
      std::min({size_t(config().blocks_per_sm), 2048 / n, size_t(config().shared_per_sm) / (g->smem + 1024)});
  if (g->coop && blocks > size_t(config().sm_count) * resident) return cudaErrorCooperativeLaunchTooLarge;
  ++n_launches, n_blocks = blocks, kernel_names.insert(g->name);
  queues[{device, c.stream}].push_back({std::move(g), nullptr});
  if (!config().deferred) run();
  return cudaSuccess;
}
}  // namespace cuda_host
cudaError_t cuda_host_set_smem(const void* fn, int bytes) {
  if (bytes > 227 * 1024) return cudaErrorInvalidValue;
  int asked;
  cudaGetDevice(&asked);
  ++cuda_host::n_queries;
  return cuda_host::smem_limit[{fn, asked}] = bytes, cudaSuccess;
}
cudaError_t cuda_host_resident(int* blocks, int threads, size_t smem) {
  const auto& config = cuda_host::config();
  const int by_threads = 2048 / threads,
            by_smem = smem ? int(size_t(config.shared_per_sm) / (smem + 1024)) : by_threads;
  ++cuda_host::n_queries;
  *blocks = std::min({by_threads, by_smem, config.blocks_per_sm});
  return config.built ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
cudaError_t cuda_host_attributes(cudaFuncAttributes* attributes) {
  ++cuda_host::n_queries;
  *attributes = {90};
  return cuda_host::config().built ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}
// A device whose attributes a test changes gets a new number.
cudaError_t cudaGetDevice(int* d) {
  using namespace cuda_host;
  const Config& c = config();
  const std::array<int, 4> mine{device, c.sm_count, c.shared_per_sm, c.cooperative};
  const auto at = std::find(devices.begin(), devices.end(), mine);
  *d = int(at - devices.begin());
  if (at == devices.end()) devices.push_back(mine);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  return cuda_host::device = d, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  const auto& [number, multiprocessors, shared, cooperative] = cuda_host::devices.at(size_t(d));
  ++cuda_host::n_queries;
  return *v = a == cudaDevAttrMultiProcessorCount                ? multiprocessors
              : a == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? shared
                                                                 : cooperative,
         cudaSuccess;
}
