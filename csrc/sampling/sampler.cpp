#include "sampling/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <string>

namespace treadle {

namespace {

constexpr int32_t kNone = -1;

// Both without branches: on flat rows they would be mispredicted all the time.
bool more_likely(const Candidate& a, const Candidate& b) {
    return (a.value > b.value) | ((a.value == b.value) & (a.id < b.id));
}

void drop_after(const Candidate& last, std::vector<Candidate>& candidates) {
    size_t count = 0;
    for (const Candidate c : candidates) {
        candidates[count] = c;
        count += !more_likely(last, c);
    }
    candidates.resize(count);
}

double mass(std::span<const Candidate> candidates) {
    double sums[4] = {};  // four chains of additions
    size_t i = 0;
    for (; i + 4 <= candidates.size(); i += 4)
        for (size_t chain = 0; chain < 4; ++chain) sums[chain] += candidates[i + chain].weight;
    for (; i < candidates.size(); ++i) sums[0] += candidates[i].weight;
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Last of the shortest run of most likely candidates whose weights reach `target`. Halves the part that holds
// it, as quickselect does, so that only a handful is ever sorted. Reorders the candidates.
Candidate last_to_reach(double target, std::vector<Candidate>& candidates) {
    constexpr int64_t kSorted = 32;
    Candidate* begin = candidates.data();
    Candidate* end = begin + candidates.size();
    while (end - begin > kSorted) {
        Candidate* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, more_likely);
        const double left = mass({begin, middle});
        if (left >= target) {
            end = middle;
        } else {
            target -= left;
            begin = middle;
        }
    }
    std::sort(begin, end, more_likely);
    for (const Candidate* c = begin; c < end - 1; ++c) {
        target -= c->weight;
        if (target <= 0) return *c;
    }
    return *(end - 1);
}

// The same by a histogram over the exponent first, so that of a flat row, too, only one bucket is looked at
// closely. `bucket` receives its candidates.
Candidate last_to_reach(double target, const std::vector<Candidate>& candidates, float max, float scale,
                        std::vector<Candidate>& bucket) {
    constexpr int kPerUnit = 64;  // 15 KB of sums: half of L1
    std::array<double, static_cast<int>(-kLeastExponent) * kPerUnit + 1> sums{};
    const auto index = [&](const Candidate& c) {  // grows as the value falls
        return static_cast<size_t>(
            std::min((max - c.value) * scale * kPerUnit, static_cast<float>(sums.size() - 1)));
    };
    for (const Candidate& c : candidates) sums[index(c)] += c.weight;
    size_t found = 0;
    double before = 0;
    double reached = 0;
    for (size_t i = 0; i < sums.size() && (i == 0 || reached < target); ++i) {
        if (sums[i] == 0) continue;
        found = i;
        before = reached;
        reached += sums[i];
    }
    bucket.clear();
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(bucket),
                 [&](const Candidate& c) { return index(c) == found; });
    return last_to_reach(target - before, bucket);
}

int32_t find_weight(const std::vector<Candidate>& candidates, double target) {
    int32_t last = kNone;
    double before = 0;
    for (const Candidate& c : candidates) {
        if (c.weight == 0) continue;
        last = c.id;
        before += c.weight;
        if (before > target) break;
    }
    return last;
}

// A float at or below x, so that a bound computed in double never excludes what it should keep.
float round_down(double x) {
    if (!(x > -FLT_MAX)) return -FLT_MAX;
    return std::nextafter(static_cast<float>(x), -INFINITY);
}

std::string describe(const std::vector<int64_t>& picks) {
    std::string list;
    for (const int64_t pick : picks) list += (list.empty() ? "" : ", ") + std::to_string(pick);
    return "no token can be chosen at position " + list +
           " of the batch: every logit is -inf or NaN, or the mask and min_tokens leave none; finish those "
           "requests "
           "and sample the others again";
}

}  // namespace

NoTokenLeft::NoTokenLeft(std::vector<int64_t> picks)
    : std::runtime_error(describe(picks)), picks_(std::move(picks)) {}

Sampler::Sampler(int64_t vocab_size) : vocab_size_(vocab_size) {
    if (vocab_size < 1 || vocab_size > std::numeric_limits<int32_t>::max())
        throw std::invalid_argument("vocab_size is " + std::to_string(vocab_size) +
                                    ", but must be between 1 and 2147483647");
}

std::vector<Choice> Sampler::sample(std::span<const Pick> picks, Pool* pool) {
    for (const Pick& pick : picks) {
        if (pick.state->vocab_size() != vocab_size_)
            throw std::invalid_argument("a state for " + std::to_string(pick.state->vocab_size()) +
                                        " tokens cannot sample from logits of " +
                                        std::to_string(vocab_size_));
    }
    std::vector<Choice> choices(picks.size());
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&](int64_t i) {
        try {
            std::unique_ptr<Scratch> scratch = take_scratch();
            choices[i] = choose(picks[i], *scratch);
            give_back(std::move(scratch));
        } catch (...) {  // out of memory; a job of the pool must not throw
            const std::lock_guard lock(failure_mutex);
            failure = std::current_exception();
        }
    };
    const int64_t count = std::ssize(picks);
    if (pool != nullptr && count > 1) {
        pool->parallel_for(count, work);
    } else {
        for (int64_t i = 0; i < count; ++i) work(i);
    }
    if (failure) std::rethrow_exception(failure);
    std::vector<int64_t> failed;
    for (int64_t i = 0; i < count; ++i)
        if (choices[i].token == kNone) failed.push_back(i);
    if (!failed.empty()) throw NoTokenLeft(std::move(failed));
    return choices;
}

Choice Sampler::choose(const Pick& pick, Scratch& scratch) const {
    const float* logits = pick.row;
    if (pick.state->adjusts()) {
        scratch.adjusted.resize(vocab_size_);
        pick.state->adjust(pick.row, scratch.adjusted.data());
        logits = scratch.adjusted.data();
    }
    const bool greedy = pick.state->options().temperature == 0;
    Choice choice{.token = greedy ? row_argmax(logits, vocab_size_) : draw(logits, *pick.state, scratch),
                  .logprob = std::numeric_limits<float>::quiet_NaN(),
                  .top = {}};
    if (choice.token != kNone && pick.state->options().logprobs) add_logprobs(pick, scratch, choice);
    return choice;
}

int32_t Sampler::draw(const float* logits, const SamplerState& state, Scratch& scratch) const {
    const SamplingOptions& options = state.options();
    const float max = row_block_maxima(logits, vocab_size_, scratch.maxima);
    if (max == -INFINITY) return kNone;
    // The cap keeps 0 * scale from becoming NaN; no two floats that matter are closer than 1e-30.
    const auto scale = static_cast<float>(std::min(1 / options.temperature, 1e30));
    const bool some_k = options.top_k > 0 && options.top_k < vocab_size_;
    const bool some_p = options.top_p < 1;

    double total = 0;  // weight of what top-p chooses from
    if (!some_k) {
        if (some_p || options.min_p == 0)
            total = row_block_weights(logits, vocab_size_, scratch.maxima, max, scale, scratch.sums);
        if (!some_p && options.min_p == 0)
            return row_find_weight(logits, vocab_size_, scratch.sums, max, scale, state.uniform() * total);
    }

    // Which logits can survive at all? All tokens of weight w or less weigh at most vocab * w together, so
    // those with w < (1 - p) * total / vocab lie in the tail that top-p drops. The slack of 1e-3 covers the
    // rounding of exp.
    float threshold = -FLT_MAX;
    if (some_k) {
        threshold = kth_largest_bound(options.top_k, scratch);
    } else {
        double weight = options.min_p;  // of the least likely survivor
        if (some_p) weight = std::max(weight, (1 - options.top_p) * total / static_cast<double>(vocab_size_));
        threshold = std::min(round_down(max + (std::log(weight) - 1e-3) / scale), max);
    }
    std::vector<Candidate>& kept = scratch.candidates;
    row_gather(logits, vocab_size_, scratch.maxima, threshold, max, scale, kept);
    if (some_k) keep_most_likely(options.top_k, scratch);
    if (some_k) total = mass(kept);
    if (some_p) {
        drop_after(last_to_reach(options.top_p * total, kept, max, scale, scratch.selection), kept);
    }
    if (options.min_p > 0) {
        const auto least = static_cast<float>(options.min_p);
        std::erase_if(kept, [least](const Candidate& c) { return c.weight < least; });
    }
    return find_weight(kept, state.uniform() * mass(kept));
}

void Sampler::add_logprobs(const Pick& pick, Scratch& scratch, Choice& choice) const {
    const float max = row_block_maxima(pick.row, vocab_size_, scratch.maxima);
    const double log_total =
        std::log(row_block_weights(pick.row, vocab_size_, scratch.maxima, max, 1, scratch.sums));
    const auto logprob = [&](float x) {
        return static_cast<float>((static_cast<double>(clean_logit(x)) - max) - log_total);
    };
    choice.logprob = logprob(pick.row[choice.token]);
    const int64_t count = *pick.state->options().logprobs;
    if (count == 0) return;
    row_gather(pick.row, vocab_size_, scratch.maxima, kth_largest_bound(count, scratch), max, 1,
               scratch.candidates);
    keep_most_likely(count, scratch);
    std::sort(scratch.candidates.begin(), scratch.candidates.end(), more_likely);
    for (const Candidate& c : scratch.candidates) choice.top.emplace_back(c.id, logprob(c.value));
}

// Reduces the gathered candidates to the `count` most likely, still in id order.
void Sampler::keep_most_likely(int64_t count, Scratch& scratch) const {
    if (std::ssize(scratch.candidates) <= count) return;
    scratch.selection = scratch.candidates;
    const auto last = scratch.selection.begin() + (count - 1);
    std::nth_element(scratch.selection.begin(), last, scratch.selection.end(), more_likely);
    drop_after(*last, scratch.candidates);
}

// At least k logits are no smaller than the k-th largest block maximum.
float Sampler::kth_largest_bound(int64_t k, Scratch& scratch) const {
    if (k > std::ssize(scratch.maxima)) return -FLT_MAX;
    scratch.order = scratch.maxima;
    const auto kth = scratch.order.begin() + (k - 1);
    std::nth_element(scratch.order.begin(), kth, scratch.order.end(), std::greater<>());
    return *kth;
}

std::unique_ptr<Sampler::Scratch> Sampler::take_scratch() {
    const std::lock_guard lock(idle_mutex_);
    if (idle_.empty()) return std::make_unique<Scratch>();
    std::unique_ptr<Scratch> scratch = std::move(idle_.back());
    idle_.pop_back();
    return scratch;
}

void Sampler::give_back(std::unique_ptr<Scratch> scratch) {
    const std::lock_guard lock(idle_mutex_);
    idle_.push_back(std::move(scratch));
}

}  // namespace treadle
