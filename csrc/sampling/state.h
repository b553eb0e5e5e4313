// What one request brings to the choice of its next token.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace treadle {

// Mirrors treadle.core.SamplingParams; see there for the meaning and the defaults.
struct SamplingOptions {
    double temperature = 1.0;
    int64_t top_k = 0;
    double top_p = 1.0;
    double min_p = 0.0;
    double repetition_penalty = 1.0;
    double presence_penalty = 0.0;
    double frequency_penalty = 0.0;
    std::unordered_map<int64_t, double> logit_bias;
    int64_t min_tokens = 0;
    std::vector<int64_t> stop_ids;    // suppressed before min_tokens
    std::optional<int64_t> logprobs;  // k: of the chosen token and the k most likely ones
    uint64_t seed = 0;
};

class SamplerState {
public:
    // Throws std::invalid_argument that names the parameter, its value and what is allowed.
    SamplerState(int64_t vocab_size, const SamplingOptions& options, std::span<const int64_t> prompt_ids);

    // Appends one output token: the position of the next draw moves on and the penalties count it.
    void accept(int64_t token);

    // Ids that the next tokens may take: bit i % 32 of word i / 32. Stays until it is replaced or cleared.
    void set_mask(std::span<const uint32_t> words);
    void clear_mask() { mask_.clear(); }

    int64_t vocab_size() const { return vocab_size_; }
    int64_t output_tokens() const { return output_tokens_; }
    const SamplingOptions& options() const { return options_; }

    // Uniform in [0, 1): a function of the seed and the number of output tokens only.
    double uniform() const;

    // True when the tokens are not chosen from the raw logits.
    bool adjusts() const;

    // adjusted[0, vocab) = row after, in this order: bias, repetition, frequency and presence penalty,
    // min_tokens, mask.
    void adjust(const float* row, float* adjusted) const;

private:
    // A token whose logit this request changes.
    struct Edit {
        int32_t id;
        float bias = 0;
        bool in_prompt = false;
        int64_t in_output = 0;
    };

    Edit& edit_of(int64_t id);
    bool penalises() const;
    bool suppresses() const { return output_tokens_ < options_.min_tokens && !options_.stop_ids.empty(); }
    void check_id(const char* what, int64_t id) const;

    int64_t vocab_size_;
    SamplingOptions options_;
    int64_t output_tokens_ = 0;
    std::vector<Edit> edits_;
    std::unordered_map<int64_t, size_t> edit_index_;  // id -> index in edits_
    std::vector<uint32_t> mask_;                      // empty: no mask
};

}  // namespace treadle
