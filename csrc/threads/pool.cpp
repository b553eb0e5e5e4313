#include "threads/pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>

namespace treadle {

namespace {

// A CPU that the process may not use (a cpuset changed, say) leaves the thread where the kernel puts it.
void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

Pool::Pool(std::vector<int> cpus) : cpus_(std::move(cpus)), process_(getpid()) {
    if (cpus_.empty()) throw std::invalid_argument("a pool needs at least one CPU");
    for (int cpu : cpus_) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || std::count(cpus_.begin(), cpus_.end(), cpu) != 1)
            throw std::invalid_argument("CPU " + std::to_string(cpu) + " is out of range or named twice");
    }
    for (int worker = 1; worker < size(); ++worker) {
        try {
            threads_.emplace_back([this, worker] { work(worker); });
        } catch (const std::system_error& error) {
            stop();
            throw std::runtime_error("the system gave " + std::to_string(worker) + " of " +
                                     std::to_string(size()) + " worker threads (" + error.what() +
                                     "); raise its limits on threads and memory or use fewer threads");
        }
        pthread_setname_np(threads_.back().native_handle(), "treadle-worker");
    }
}

Pool::~Pool() {
    if (getpid() == process_) {
        stop();
        return;
    }
    // A copy of the process that fork() made has no workers, and their handles may name its own threads by
    // now.
    new std::vector<std::thread>(std::move(threads_));
}

void Pool::stop() {
    stopping_ = true;
    generation_.add(1);
    generation_.wake();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run_erased(Erased job, void* context) {
    if (getpid() != process_)
        throw std::runtime_error(
            "the worker threads of a pool stay behind when its process forks: load the model in "
            "the process that uses it");
    const std::lock_guard lock(one_job_);
    cpu_set_t before;
    const bool restore = sched_getaffinity(0, sizeof before, &before) == 0;
    if (restore) pin(cpus_[0]);
    job_ = job;
    context_ = context;
    running_.store(static_cast<uint32_t>(size() - 1));
    generation_.add(1);
    generation_.wake();
    job(context, 0);
    running_.wait([](uint32_t running) { return running == 0; });
    if (restore) sched_setaffinity(0, sizeof before, &before);
}

void Pool::work(int worker) {
    pin(cpus_[worker]);
    uint32_t seen = 0;
    for (;;) {
        generation_.wait([&](uint32_t generation) { return generation != seen; });
        seen += 1;
        if (stopping_) return;
        job_(context_, worker);
        if (running_.add(~0u) == 0) running_.wake();
    }
}

}  // namespace treadle
