// Persistent workers, pinned to a CPU each, or to all CPUs of the pool together.
//
// The calling thread is worker 0: while a job runs it has its place like the others and gets its own affinity
// back afterwards. The others sleep on a futex between jobs, so an idle pool uses no CPU.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/crowding.h"
#include "threads/futex.h"

namespace treadle {

class Pool {
public:
    // One worker per logical CPU id. Unless `pinned`, the system may move workers among these CPUs. Throws
    // std::invalid_argument when `cpus` is empty or names a CPU twice, std::runtime_error when the system
    // refuses to make a thread.
    explicit Pool(std::vector<int> cpus, bool pinned = true);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(cpus_.size()); }

    // How many workers take part in jobs: the first ones.
    int active() const { return active_.load(std::memory_order_relaxed); }
    // From the next job on. Throws std::invalid_argument unless 1 <= workers <= size().
    void set_active(int workers);

    // How many took part in the last job.
    int working() const { return static_cast<int>(generation_.load() & kWorkers); }

    // Whether the workers of a job wait for each other so often that one without its CPU stops them all: then
    // those on CPUs that other processes keep busy are left out (threads/crowding.h).
    enum class Waits { seldom, often };

    // Calls job(worker) once on each of the active workers, or on some of them, and returns when all have
    // returned. Only one job runs at a time; a second caller waits. Must not be called from inside a job.
    // `job` must not throw. Throws std::runtime_error in a process that fork() made, where the workers are
    // missing.
    template <class Job>
    void run(Job&& job, Waits waits = Waits::seldom) {
        run_erased(
            [](void* context, int worker) { (*static_cast<std::remove_reference_t<Job>*>(context))(worker); },
            &job, waits);
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

    static constexpr uint32_t kWorkers = (1u << 16) - 1;  // mask of the lower half of a generation

    void run_erased(Erased job, void* context, Waits waits);
    void work(int worker);
    void pin(int place) const;
    void choose_places(bool watched);
    void start_generation(int workers);
    void stop();

    std::vector<int> cpus_;
    bool pinned_;
    std::atomic<int> active_;
    pid_t process_;
    std::mutex one_job_;
    Erased job_ = nullptr;
    void* context_ = nullptr;
    bool watched_ = false;         // whether the current job's delays are wanted
    std::vector<int> places_;      // of the workers in the current job, as indexes of cpus_
    std::vector<int64_t> delays_;  // ns that each worker was ready to run and did not, if watched
    int64_t began_ = 0;            // ns on the steady clock: the current job
    Crowding crowding_;
    bool stopping_ = false;
    // Counts jobs in its upper half; workers wait for it to change. The lower half is the number of workers
    // that the job is for: one that it is not for may miss it, and must not take the next one for it.
    alignas(64) Word generation_;
    alignas(64) Word running_;  // workers that have not finished the current job
    std::vector<std::thread> threads_;
};

}  // namespace treadle
