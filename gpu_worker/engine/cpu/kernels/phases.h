// Work that threads share: phases of units, one phase after the other.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

// The number of this thread in an OpenMP region, and of all its threads. Not every system that has the
// runtime has its header, too.
#if defined(_OPENMP)
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
inline int this_thread() { return omp_get_thread_num(); }
inline int all_threads() { return omp_get_num_threads(); }
#else
inline int this_thread() { return 0; }
inline int all_threads() { return 1; }
#endif

inline void spin() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How a thread waits for others: it looks SPINS times, then offers its core to other processes, YIELDS times
// (some 0.3 ms where none takes it). Then it sleeps for moments: the system continues a thread that has lost
// its core on one that is idle, but not on one that is offered.
constexpr int SPINS = 100, YIELDS = 1000;
constexpr std::chrono::microseconds MOMENT{100};

inline void wait(int times) {
    if (times < SPINS) spin();
    else if (times < SPINS + YIELDS) std::this_thread::yield();
    else std::this_thread::sleep_for(MOMENT);
}

// What the threads of a region share. A phase is over when its units are done, not when all threads have
// come: a thread that has lost its core to another process holds up nobody, unless it lost it within a unit.
struct Progress {
    struct alignas(64) Claimed {
        std::atomic<uint64_t> next{0};  // the phase in the upper half, the units claimed in it in the lower
    };
    std::vector<Claimed> claimed;  // of each thread's own units
    alignas(64) std::atomic<int64_t> done{0};  // units of all phases
    explicit Progress(int threads) : claimed(threads) {}
};

// A thread's way through the phases; all threads go through the same.
class Phases {
    Progress& progress;
    int thread = this_thread(), threads = all_threads();
    uint64_t phase = 0;
    int64_t expected = 0;

    // The next of the units [begin, end) of a thread, or `end`.
    int claim(int owner, int begin, int end) {
        std::atomic<uint64_t>& next = progress.claimed[owner].next;
        uint64_t seen = next.load(std::memory_order_relaxed);
        int unit;
        do {
            uint64_t at = seen >> 32;
            if (at > phase) return end;
            unit = begin + (at == phase ? (int)(uint32_t)seen : 0);
            if (unit >= end) return end;
        } while (!next.compare_exchange_weak(
            seen, phase << 32 | (uint32_t)(unit - begin + 1), std::memory_order_relaxed));
        return unit;
    }

public:
    explicit Phases(Progress& progress) : progress(progress) {}
    int number() const { return thread; }

    // Calls `each(unit)` for all units, shared among the threads; returns when all are done. A thread begins
    // with the units that are its own, the same in every step, so that they stay in its caches; then it helps
    // the others.
    template <class F> void run(int units, F each) {
        phase++;
        expected += units;
        int completed = 0;
        for (int i = 0; i < threads; i++) {
            int owner = (thread + i) % threads;
            int begin = (int64_t)units * owner / threads, end = (int64_t)units * (owner + 1) / threads;
            for (int unit; (unit = claim(owner, begin, end)) < end; completed++) each(unit);
        }
        if (completed) progress.done.fetch_add(completed, std::memory_order_release);
        for (int times = 0; progress.done.load(std::memory_order_acquire) < expected; times++) wait(times);
    }
};
