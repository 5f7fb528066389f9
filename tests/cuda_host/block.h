// Emulated threads, blocks and grids; what they wait for, and how barriers and warp operations complete. Part
// of engine.cpp: one OS thread runs everything.
#pragma once
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"
#include "race.h"

namespace cuda_host {
namespace {
enum class St : uint8_t { ready, at_barrier, at_warp, done };
struct Block;
constexpr unsigned kPolls = 32;  // words that a thread may wait for: packets, headers, notices
struct Thread {
  Fiber f;
  char* stack = nullptr;
  Block* b = nullptr;
  uint3 tid;
  int lin = 0, race_id = -1, pred = 0, src = 0;
  St st = St::ready;
  bool idle = false;  // yielded because a polled value had not changed
  Op op = Op::none;
  unsigned mask = 0;
  Loc at{"?", 0};
  uint64_t val = 0, res = 0;
  struct {
    const void* at;
    uint64_t seen;
  } polls[kPolls] = {};  // its latest atomic loads, since it last did anything else
  unsigned n_polls = 0;
};
struct Grid {
  std::string name;
  std::function<void()> body;
  dim3 grid, block;
  size_t smem = 0;
  int dev = 0, race_base = 0;
  cudaStream_t stream = nullptr;
  bool coop = false;
  bool early = false;   // may begin before the stream's previous grid ends
  bool waited = false;  // one of its threads has waited for that end
  unsigned next = 0;
  std::vector<unsigned> order;
  char* tls = nullptr;  // this OS thread's copy of the kernel module's __shared__ variables
  size_t tls_size = 0;
};
struct Block {
  Grid* g = nullptr;
  uint3 id;
  std::vector<Thread> th;
  std::vector<int> ready;
  size_t head = 0;
  int live = 0, waiting = 0;
  unsigned warp_wait[32] = {}, warp_done[32] = {};  // lanes waiting in a warp operation / exited
  std::vector<char> shared;  // image of the static __shared__ variables while another block runs
  char* dyn = nullptr;
  bool triggered = false;  // one of its threads let the stream's next kernel begin
};
struct Work {
  std::unique_ptr<Grid> g;
  std::function<void()> host_op;
};

std::recursive_mutex mtx;
std::map<std::pair<int, cudaStream_t>, std::deque<Work>> queues;
std::map<std::pair<const void*, int>, int> smem_limit;  // of a kernel on a device
std::vector<std::unique_ptr<Block>> active, spare;
std::vector<int> scratch;
std::mt19937_64 rng;
Fiber main_fiber;
Thread* cur = nullptr;
Block* loaded = nullptr;  // block whose static __shared__ contents are in place
int device = 0;
// At index i the device that cudaGetDevice calls i: number, multiprocessors, bytes of shared memory,
// whether it has cooperative launches.
std::vector<std::array<int, 4>> devices;
uint64_t n_queries = 0;
uint64_t n_steps = 0, n_launches = 0, n_blocks = 0;
uint64_t progress = 0;                   // step at which a thread last did more than re-read unchanged flags
uint64_t n_clock_reads = 0, leapt = 0;   // globaltimer() is steps and leaps
constexpr uint64_t kLeap = 100'000'000;  // nanoseconds
constexpr int kMostLeaps = 100;          // in one run; a wait of more than 10 s is a deadlock
std::string error;
unsigned rnd(size_t n) {
  return unsigned(rng() % n);
}

std::string str(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}
std::string str(Loc l) {
  const char* s = strrchr(l.file, '/');
  return std::string(s ? s + 1 : l.file) + ":" + std::to_string(l.line);
}
const char* name(const Thread& t) {
  static const char* n[] = {"?", "__syncthreads", "__syncthreads_or", "__shfl_xor_sync"};
  return t.st == St::done    ? "exited"
         : t.st == St::ready ? (t.idle ? "polls memory" : "running")
                             : n[int(t.op)];
}
std::string where(const Thread& t) {
  return t.b->g->name + " gpu " + std::to_string(t.b->g->dev) + " block " + str(t.b->id) + " thread " +
         str(t.tid);
}
// What every thread of a block is doing, runs of equal states folded.
std::string describe(const Block& b) {
  std::string s;
  auto key = [](const Thread& t) {
    return std::string(name(t)) +
           (t.st == St::done || (t.st == St::ready && !t.idle) ? "" : " at " + str(t.at));
  };
  for (size_t i = 0, j; i < b.th.size(); i = j) {
    for (j = i + 1; j < b.th.size() && key(b.th[i]) == key(b.th[j]);) ++j;
    if (s.size() > 1500) return s + "\n    ...";
    s += "\n    threads " + std::to_string(i) + ".." + std::to_string(j - 1) + ": " + key(b.th[i]);
  }
  return s;
}
[[noreturn]] void die(const std::string& msg) {  // from a fiber: go back to the scheduler, which throws
  error = msg;
  switch_fiber(cur->f, main_fiber, true);
  __builtin_unreachable();
}
void back_to_scheduler() {
  switch_fiber(cur->f, main_fiber);
}
void make_ready(Thread& t) {
  t.st = St::ready, t.idle = false;
  t.b->ready.push_back(t.lin);
}

void try_barrier(Block& b) {
  if (!b.waiting || b.waiting < b.live) return;
  int any = 0;
  Thread* first = nullptr;
  for (auto& t : b.th) {
    if (t.st != St::at_barrier) continue;
    if (!first) first = &t;
    if (t.op != first->op || t.at.line != first->at.line || strcmp(t.at.file, first->at.file))
      throw std::runtime_error("divergent barrier in " + where(t) + ": waits in " + name(t) + " at " +
                               str(t.at) + " while thread " + str(first->tid) + " waits in " + name(*first) +
                               " at " + str(first->at));
    any |= t.pred != 0;
  }
  if (b.live < int(b.th.size()))
    throw std::runtime_error("barrier not reached by all threads in " + where(*first) + ": " +
                             std::to_string(b.th.size() - b.live) +
                             " thread(s) exited before it:" + describe(b));
  b.waiting = 0;
  scratch.clear();
  for (auto& t : b.th) t.res = any, make_ready(t), scratch.push_back(t.race_id);
  race::join(scratch.data(), int(scratch.size()));
}
// Completes the warp operation that thread t waits in, if all lanes of its mask are there (or have exited).
void try_warp(Block& b, Thread& t) {
  const int w = t.lin / 32, base = w * 32, n = std::min<int>(32, int(b.th.size()) - base);
  if (t.mask & ~(b.warp_wait[w] | b.warp_done[w])) return;
  const unsigned lanes = t.mask & b.warp_wait[w];
  for (int j = 0; j < n; ++j) {
    if (!(lanes >> j & 1)) continue;
    Thread& o = b.th[base + j];
    if (o.mask != t.mask || o.at.line != t.at.line || strcmp(o.at.file, t.at.file)) {
      char m[64];
      snprintf(m, sizeof m, " (masks %08x and %08x)", t.mask, o.mask);
      throw std::runtime_error("divergent warp operation in " + where(t) + ": " + name(t) + " at " +
                               str(t.at) + " while lane " + std::to_string(j) + " is in " + name(o) + " at " +
                               str(o.at) + m);
    }
    if (o.src >= n || !(lanes >> o.src & 1))
      throw std::runtime_error("undefined shuffle in " + where(o) + " at " + str(o.at) + ": reads lane " +
                               std::to_string(o.src) +
                               (o.src >= n                    ? ", which does not exist"
                                : b.warp_done[w] >> o.src & 1 ? ", which has exited"
                                                              : ", which is not in the mask"));
  }
  for (int j = 0; j < n; ++j)
    if (lanes >> j & 1) {
      Thread& o = b.th[base + j];
      o.res = b.th[base + o.src].val;
      make_ready(o);
    }
  b.warp_wait[w] &= ~lanes;
}
void exit_warp(Block& b, Thread& t) {  // an exit may complete what the other lanes wait for
  const int w = t.lin / 32;
  b.warp_done[w] |= 1u << t.lin % 32;
  for (int j = 0; j < 32; ++j)
    if (b.warp_wait[w] >> j & 1) try_warp(b, b.th[w * 32 + j]);
}

}  // namespace
}  // namespace cuda_host
