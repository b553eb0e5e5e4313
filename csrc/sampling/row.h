// Passes over one row of logits, f32[size]. All read the row once, at memory speed where nothing else is
// asked.
//
// Values that no softmax can take have one meaning everywhere: NaN counts as -inf, +inf as the largest float.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

namespace treadle {

// A block's maximum decides whether a later pass looks into it at all. 64 floats are 4 cache lines: small
// enough that few blocks of a peaked row stay interesting, large enough that the maxima (2.4k of a 152k row)
// stay in L1.
inline constexpr int64_t kRowBlock = 64;

// Weights of exp(-30) and less count as 0, so that most blocks of a peaked row are skipped. Even all 152k
// tokens of such a weight are 1.4e-8 of the total together, less than the rounding of float.
inline constexpr float kLeastExponent = -30.0f;

inline float clean_logit(float x) { return std::isnan(x) ? -INFINITY : (x > FLT_MAX ? FLT_MAX : x); }

struct Candidate {
    float value;   // cleaned logit
    float weight;  // exp((value - max) / temperature)
    int32_t id;
};

// Id of the largest logit, the lowest id when several are equal; -1 when all are -inf.
int32_t row_argmax(const float* row, int64_t size);

// Writes the maximum of every block of kRowBlock logits and returns the largest.
float row_block_maxima(const float* row, int64_t size, std::vector<float>& maxima);

// Writes sum over block of exp((row[i] - max) * scale) and returns the total. `max` must be finite, `scale`
// positive.
double row_block_weights(const float* row, int64_t size, const std::vector<float>& maxima, float max,
                         float scale, std::vector<float>& sums);

// Id at which the running sum of the same weights, in id order, first exceeds `target` (up to float rounding
// within a block). Never an id of weight 0.
int32_t row_find_weight(const float* row, int64_t size, const std::vector<float>& sums, float max,
                        float scale, double target);

// Replaces `out` by every logit >= threshold except -inf, in id order, with the same weights.
void row_gather(const float* row, int64_t size, const std::vector<float>& maxima, float threshold, float max,
                float scale, std::vector<Candidate>& out);

// target[i] = row[i] where bit i of the mask (32 per word, lowest first) is set, else -inf.
void row_copy_masked(const float* row, int64_t size, const uint32_t* mask, float* target);

}  // namespace treadle
