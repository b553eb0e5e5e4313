// Which CPUs other processes keep busy, and so which ones a job of many short, dependent parts does better
// without: there, everybody waits for the worker whose CPU runs something else.
#pragma once

#include <cstdint>
#include <vector>

namespace treadle {

// Decides from how long workers were ready to run and did not. Not thread-safe. Times in nanoseconds.
class Crowding {
public:
    explicit Crowding(int places);

    // During a job of `job` ns that ended at `now`, the worker at places[i] waited delays[i] for its CPU.
    void observe(int64_t now, int64_t job, const std::vector<int>& places,
                 const std::vector<int64_t>& delays);

    // The places to use at `now` of the first `active` ones, at least half of them, in order.
    const std::vector<int>& uncrowded(int64_t now, int active);

private:
    struct Place {
        int64_t delay = 0;        // in the current window
        double share = 0;         // of the last window in which it took part
        int64_t avoid_until = 0;  // 0: not crowded
        int64_t pause = 0;        // how long it was avoided the last time
    };
    std::vector<Place> places_;
    int64_t window_ = 0;  // length so far
    std::vector<int> chosen_;
};

// Nanoseconds that the calling thread has been ready to run and waited for a CPU, since it began
// (proc_pid_schedstat(5)); 0 where the kernel does not say.
int64_t run_delay();

}  // namespace treadle
