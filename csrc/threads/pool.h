// Persistent pinned workers.
//
// The calling thread is worker 0: while a job runs it is pinned to the first CPU and gets its own affinity
// back afterwards. The others sleep on a futex between jobs, so an idle pool uses no CPU.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/futex.h"

namespace treadle {

class Pool {
public:
    // One worker per logical CPU id. Throws std::invalid_argument when `cpus` is empty or names a CPU twice,
    // std::runtime_error when the system refuses to make a thread.
    explicit Pool(std::vector<int> cpus);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(cpus_.size()); }

    // Calls job(worker) once on each of the workers and returns when all have returned. Only one job runs at
    // a time; a second caller waits. Must not be called from inside a job. `job` must not throw. Throws
    // std::runtime_error in a process that fork() made, where the workers are missing.
    template <class Job>
    void run(Job&& job) {
        run_erased(
            [](void* context, int worker) { (*static_cast<std::remove_reference_t<Job>*>(context))(worker); },
            &job);
    }

    // Calls f(i) for every i in [0, n), claimed one by one.
    template <class F>
    void parallel_for(int64_t n, F&& f) {
        std::atomic<int64_t> next{0};
        run([&](int) {
            for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) f(i);
        });
    }

private:
    using Erased = void (*)(void*, int);

    void run_erased(Erased job, void* context);
    void work(int worker);
    void stop();

    std::vector<int> cpus_;
    pid_t process_;
    std::mutex one_job_;
    Erased job_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    alignas(64) Word generation_;  // counts jobs; workers wait for it to change
    alignas(64) Word running_;     // workers that have not finished the current job
    std::vector<std::thread> threads_;
};

}  // namespace treadle
