#include "sampling/state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "sampling/philox.h"
#include "sampling/row.h"

namespace treadle {

namespace {

template <class T>
void require(bool holds, const char* name, T value, const char* allowed) {
    if (holds) return;
    std::ostringstream message;
    message << name << " is " << value << ", but must be " << allowed;
    throw std::invalid_argument(message.str());
}

void check(const SamplingOptions& o) {
    require(std::isfinite(o.temperature) && o.temperature >= 0, "temperature", o.temperature,
            "0 (greedy) or positive");
    require(o.top_k >= 0, "top_k", o.top_k, "0 (all tokens) or positive");
    require(o.top_p >= 0 && o.top_p <= 1, "top_p", o.top_p, "between 0 and 1");
    require(o.min_p >= 0 && o.min_p <= 1, "min_p", o.min_p, "between 0 and 1");
    require(std::isfinite(o.repetition_penalty) && o.repetition_penalty > 0, "repetition_penalty",
            o.repetition_penalty, "positive (1 changes nothing)");
    require(std::isfinite(o.presence_penalty), "presence_penalty", o.presence_penalty, "a finite number");
    require(std::isfinite(o.frequency_penalty), "frequency_penalty", o.frequency_penalty, "a finite number");
    require(o.min_tokens >= 0, "min_tokens", o.min_tokens, "0 or positive");
    for (const auto& [id, bias] : o.logit_bias)
        require(std::isfinite(bias), "logit_bias", bias, "a finite number");
}

}  // namespace

SamplerState::SamplerState(int64_t vocab_size, const SamplingOptions& options,
                           std::span<const int64_t> prompt_ids)
    : vocab_size_(vocab_size), options_(options) {
    require(vocab_size > 0 && vocab_size <= std::numeric_limits<int32_t>::max(), "vocab_size", vocab_size,
            "between 1 and 2147483647");
    check(options_);
    const int64_t logprobs = options_.logprobs.value_or(0);
    require(logprobs >= 0 && logprobs <= vocab_size, "logprobs", logprobs,
            "between 0 and the vocabulary's size");
    for (const int64_t id : options_.stop_ids) check_id("stop_ids", id);
    for (const auto& [id, bias] : options_.logit_bias) {
        check_id("logit_bias", id);
        edit_of(id).bias = static_cast<float>(bias);
    }
    for (const int64_t id : prompt_ids) {
        check_id("prompt_ids", id);
        if (options_.repetition_penalty != 1) edit_of(id).in_prompt = true;
    }
}

void SamplerState::accept(int64_t token) {
    check_id("accept", token);
    if (penalises()) edit_of(token).in_output += 1;
    output_tokens_ += 1;
}

void SamplerState::set_mask(std::span<const uint32_t> words) {
    const int64_t expected = (vocab_size_ + 31) / 32;
    if (std::ssize(words) != expected) {
        throw std::invalid_argument("the mask has " + std::to_string(words.size()) +
                                    " words of 32 bits, but " + std::to_string(vocab_size_) +
                                    " tokens need " + std::to_string(expected));
    }
    mask_.assign(words.begin(), words.end());
}

double SamplerState::uniform() const {
    return philox_uniform(options_.seed, static_cast<uint64_t>(output_tokens_));
}

bool SamplerState::adjusts() const { return !edits_.empty() || suppresses() || !mask_.empty(); }

void SamplerState::adjust(const float* row, float* adjusted) const {
    if (mask_.empty()) {
        std::copy_n(row, vocab_size_, adjusted);
    } else {
        row_copy_masked(row, vocab_size_, mask_.data(), adjusted);
    }
    // A masked logit is -inf already and every edit leaves it so: the mask may come first.
    for (const Edit& edit : edits_) {
        double x = static_cast<double>(clean_logit(adjusted[edit.id])) + edit.bias;
        if (edit.in_prompt || edit.in_output > 0)
            x = x > 0 ? x / options_.repetition_penalty : x * options_.repetition_penalty;
        if (edit.in_output > 0)
            x -= options_.frequency_penalty * static_cast<double>(edit.in_output) + options_.presence_penalty;
        adjusted[edit.id] = clean_logit(static_cast<float>(x));
    }
    if (suppresses())
        for (const int64_t id : options_.stop_ids) adjusted[id] = -INFINITY;
}

SamplerState::Edit& SamplerState::edit_of(int64_t id) {
    const auto [entry, added] = edit_index_.try_emplace(id, edits_.size());
    if (added) edits_.push_back({.id = static_cast<int32_t>(id)});
    return edits_[entry->second];
}

bool SamplerState::penalises() const {
    return options_.repetition_penalty != 1 || options_.presence_penalty != 0 ||
           options_.frequency_penalty != 0;
}

void SamplerState::check_id(const char* what, int64_t id) const {
    if (id >= 0 && id < vocab_size_) return;
    throw std::invalid_argument(std::string(what) + ": token id " + std::to_string(id) +
                                " is outside the vocabulary (0 to " + std::to_string(vocab_size_ - 1) + ")");
}

}  // namespace treadle
