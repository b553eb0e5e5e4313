// What one run of a Program computes.
#pragma once

#include <cstdint>
#include <vector>

namespace treadle {

// Some consecutive tokens of one sequence.
struct StepSequence {
    int64_t first_row;     // its first row in the step
    int64_t query_len;     // tokens in this step
    int64_t past_len;      // tokens already in the cache
    const int32_t* table;  // its cache block ids
};

struct Step {
    std::vector<int32_t> tokens;  // [rows], sequence after sequence
    std::vector<StepSequence> sequences;
    std::vector<int32_t> row_sequence;  // [rows] which sequence a row belongs to
    std::vector<int32_t> logits_rows;   // rows whose logits are wanted

    int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
    int64_t position(int64_t row) const {
        const StepSequence& s = sequences[row_sequence[row]];
        return s.past_len + row - s.first_row;
    }
};

}  // namespace treadle
