#include "threads/crowding.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace treadle {

namespace {

constexpr int64_t kMillisecond = 1'000'000;
// Long enough that one interruption of a few milliseconds, which happens on quiet machines too, is no crowd
// among few workers.
constexpr int64_t kWindow = 50 * kMillisecond;
// A busy CPU is tried again after the first pause, then after twice as long each time: the trial takes a
// window at the crowded speed, so that of the last pause costs 1 %.
constexpr int64_t kFirstPause = 1000 * kMillisecond, kLastPause = 4000 * kMillisecond;

struct Schedstat {
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    ~Schedstat() {
        if (file >= 0) close(file);
    }
};

}  // namespace

Crowding::Crowding(int places) : places_(places) {}

void Crowding::observe(int64_t now, int64_t job, const std::vector<int>& places,
                       const std::vector<int64_t>& delays) {
    for (size_t i = 0; i < places.size(); ++i) places_[places[i]].delay += delays[i];
    window_ += job;
    if (window_ < kWindow) return;
    // Everybody waits while one worker does, so all lose its share; without it they lose its part of the
    // work at most, and of the memory's bandwidth less than that.
    const double most = 0.5 / static_cast<double>(places.size());
    for (int index : places) {
        Place& place = places_[index];
        place.share = static_cast<double>(place.delay) / static_cast<double>(window_);
        if (place.share > most) {
            place.pause = place.pause == 0 ? kFirstPause : std::min(2 * place.pause, kLastPause);
            place.avoid_until = now + place.pause;
        } else {
            place.pause = 0;
        }
    }
    for (Place& place : places_) place.delay = 0;
    window_ = 0;
}

const std::vector<int>& Crowding::uncrowded(int64_t now, int active) {
    chosen_.clear();
    for (int place = 0; place < active; ++place) chosen_.push_back(place);
    const int keep = std::max(1, active / 2);
    while (static_cast<int>(chosen_.size()) > keep) {
        const auto worst = std::max_element(chosen_.begin(), chosen_.end(), [&](int a, int b) {
            const auto badness = [&](int p) { return places_[p].avoid_until > now ? places_[p].share : 0.0; };
            return badness(a) < badness(b);
        });
        if (places_[*worst].avoid_until <= now) break;
        chosen_.erase(worst);
    }
    return chosen_;
}

int64_t run_delay() {
    static thread_local const Schedstat stat;
    char text[64];
    const ssize_t length = stat.file < 0 ? -1 : pread(stat.file, text, sizeof text - 1, 0);
    if (length <= 0) return 0;
    text[length] = 0;
    const char* second = std::strchr(text, ' ');  // time on a CPU, time waiting for one, time slices
    return second == nullptr ? 0 : std::strtoll(second, nullptr, 10);
}

}  // namespace treadle
