// Chooses tokens from logits, one row per choice, in parallel over the pool.
//
// Order of operations for one choice:
//   1. bias; repetition penalty over prompt and output (CTRL, arXiv 1909.05858: divides positive, multiplies
//   negative
//      logits); frequency and presence penalty over the output (OpenAI API); min_tokens; grammar mask
//   2. temperature; 0 takes the largest logit, the lowest id among equals, and ends here
//   3. top-k: the k largest, the lower id first among equals
//   4. top-p: of these, renormalised, the shortest run of most likely tokens that reaches p; at least one
//   5. min-p: of these, the tokens at least min_p times as likely as the most likely one
//   6. draw: the inverse of the cumulative distribution in id order, at the state's uniform number
//
// Log-probabilities are the natural log-softmax of the raw row, before all of this.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "sampling/row.h"
#include "sampling/state.h"
#include "threads/pool.h"

namespace treadle {

// One token to choose. Several picks may name the same row.
struct Pick {
    const float* row;  // f32[vocab], only read
    const SamplerState* state;
};

struct Choice {
    int32_t token;
    float logprob;                               // NaN unless asked for
    std::vector<std::pair<int32_t, float>> top;  // (id, logprob), most likely first
};

// Mask, suppression and logits left nothing to choose. The other picks are not at fault and may be sampled
// again.
class NoTokenLeft : public std::runtime_error {
public:
    explicit NoTokenLeft(std::vector<int64_t> picks);
    const std::vector<int64_t>& picks() const { return picks_; }

private:
    std::vector<int64_t> picks_;
};

class Sampler {
public:
    // Throws std::invalid_argument unless 1 <= vocab_size < 2^31.
    explicit Sampler(int64_t vocab_size);

    // One choice per pick; states are not changed. Results depend on neither pool nor neighbours. A null pool
    // samples on the calling thread. Throws std::invalid_argument for a state of another vocabulary size,
    // NoTokenLeft.
    std::vector<Choice> sample(std::span<const Pick> picks, Pool* pool);

    int64_t vocab_size() const { return vocab_size_; }

private:
    // Buffers of one choice in progress: kept between calls, because fresh memory costs more than the
    // sampling.
    struct Scratch {
        std::vector<float> adjusted;
        std::vector<float> maxima;
        std::vector<float> sums;
        std::vector<float> order;
        std::vector<Candidate> candidates;
        std::vector<Candidate> selection;
    };

    Choice choose(const Pick& pick, Scratch& scratch) const;
    int32_t draw(const float* logits, const SamplerState& state, Scratch& scratch) const;
    void add_logprobs(const Pick& pick, Scratch& scratch, Choice& choice) const;
    void keep_most_likely(int64_t count, Scratch& scratch) const;
    float kth_largest_bound(int64_t k, Scratch& scratch) const;
    std::unique_ptr<Scratch> take_scratch();
    void give_back(std::unique_ptr<Scratch> scratch);

    int64_t vocab_size_;
    std::mutex idle_mutex_;
    std::vector<std::unique_ptr<Scratch>> idle_;  // never more than choices were ever in progress at once
};

}  // namespace treadle
