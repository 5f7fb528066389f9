// TimedWait: how a CPU thread waits for another process's store to shared memory. It spins for the
// few microseconds that the other process needs if it is running. Then it yields its core, and then it
// sleeps. The wait ends after a timeout: the caller returns to Python, which handles signals and waits again.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

namespace fastvit {

class TimedWait {
 public:
  // If not every rank (process) can have a core, the thread stops spinning when it first reads the clock.
  TimedWait(uint64_t timeout_ns, int ranks)
      : begin_(std::chrono::steady_clock::now()),
        timeout_seconds_(double(timeout_ns) * 1e-9),
        spin_seconds_(ranks <= core_count() ? kSpinSeconds : 0) {}

  // Waits for a moment. Returns false after the timeout. While spinning, only each 64th call reads the clock.
  bool keep_waiting() {
    if (++calls_ % 64 == 0 || phase_ != Phase::spin) {
      const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
      if (waited >= timeout_seconds_) return false;
      phase_ = waited < spin_seconds_        ? Phase::spin
               : waited < kYieldUntilSeconds ? Phase::yield
                                             : Phase::sleep;
    }
    if (phase_ == Phase::spin)
      pause_core();
    else if (phase_ == Phase::yield)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kSleep);
    return true;
  }

 private:
  enum class Phase { spin, yield, sleep };
  // Seconds since the wait began. A process that is running needs about kSpinSeconds to send its message.
  static constexpr double kSpinSeconds = 5e-6, kYieldUntilSeconds = 2e-3;
  static constexpr std::chrono::microseconds kSleep{50};

  static void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Cores on which this process may run.
  static int64_t core_count() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  std::chrono::steady_clock::time_point begin_;
  double timeout_seconds_, spin_seconds_;
  int calls_ = 0;
  Phase phase_ = Phase::spin;
};

}  // namespace fastvit
