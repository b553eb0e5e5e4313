#include "threads/pool.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>

namespace treadle {

namespace {

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

}  // namespace

Pool::Pool(std::vector<int> cpus, bool pinned)
    : cpus_(std::move(cpus)), pinned_(pinned), active_(size()), process_(getpid()), delays_(size()),
      crowding_(size()) {
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

// A CPU that the process may not use (a cpuset changed, say) leaves the thread where the kernel puts it.
void Pool::pin(int place) const {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (pinned_)
        CPU_SET(cpus_[place], &set);
    else
        for (int cpu : cpus_) CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

void Pool::set_active(int workers) {
    if (workers < 1 || workers > size())
        throw std::invalid_argument("a pool of " + std::to_string(size()) + " workers cannot work with " +
                                    std::to_string(workers));
    active_.store(workers, std::memory_order_relaxed);
}

void Pool::start_generation(int workers) {
    generation_.store(((generation_.load() | kWorkers) + 1) | static_cast<uint32_t>(workers));
    generation_.wake();
}

void Pool::stop() {
    stopping_ = true;
    start_generation(size());
    for (std::thread& thread : threads_) thread.join();
}

void Pool::choose_places(bool watched) {
    const int active = this->active();
    if (watched) {
        places_ = crowding_.uncrowded(now_ns(), active);
        return;
    }
    places_.resize(active);
    std::iota(places_.begin(), places_.end(), 0);
}

void Pool::run_erased(Erased job, void* context, Waits waits) {
    if (getpid() != process_)
        throw std::runtime_error(
            "the worker threads of a pool stay behind when its process forks: load the model in "
            "the process that uses it");
    const std::lock_guard lock(one_job_);
    cpu_set_t before;
    const bool restore = sched_getaffinity(0, sizeof before, &before) == 0;
    watched_ = waits == Waits::often && pinned_ && active() > 1;
    choose_places(watched_);
    if (restore) pin(places_[0]);
    job_ = job;
    context_ = context;
    const int workers = static_cast<int>(places_.size());
    began_ = now_ns();
    const int64_t delay = watched_ ? run_delay() : 0;
    running_.store(static_cast<uint32_t>(workers - 1));
    start_generation(workers);
    job(context, 0);
    if (watched_) delays_[0] = run_delay() - delay;
    running_.wait([](uint32_t running) { return running == 0; });
    if (watched_) {
        const int64_t ended = now_ns();
        crowding_.observe(ended, ended - began_, places_, delays_);
    }
    if (restore) sched_setaffinity(0, sizeof before, &before);
}

void Pool::work(int worker) {
    int place = worker;
    pin(place);
    uint32_t seen = 0;
    for (;;) {
        generation_.wait([&](uint32_t generation) {
            if (generation == seen) return false;
            seen = generation;
            return true;
        });
        if (worker >= static_cast<int>(seen & kWorkers)) continue;
        if (stopping_) return;
        if (places_[worker] != place) pin(place = places_[worker]);
        // Only from the job's beginning: who takes the CPU between jobs holds up nobody. Waking up late is a
        // delay too.
        const int64_t late = watched_ ? now_ns() - began_ - run_delay() : 0;
        job_(context_, worker);
        if (watched_) delays_[worker] = late + run_delay();
        if (running_.add(~0u) == 0) running_.wake();
    }
}

}  // namespace treadle
