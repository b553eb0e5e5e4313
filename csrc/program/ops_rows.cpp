#include <algorithm>
#include <cmath>
#include <cstring>

#include "program/ops.h"
#include "quant/decode.h"

namespace treadle {

namespace {

// Values per chunk of a conversion: large enough to outweigh claiming it, a multiple of every scale group.
constexpr int64_t kConvertChunk = 2048;

int64_t chunks_of(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

}  // namespace

int64_t EmbedOp::plan(const Step& step) { return step.rows(); }

void EmbedOp::run(const Step& step, int64_t row, uint8_t*) {
    const size_t row_bytes = file_bytes(format_, out_.width());
    dequantise(format_, table_ + step.tokens[row] * row_bytes, out_.width(), out_.row(row));
}

int64_t SelectOp::plan(const Step& step) { return out_.rows(step); }

void SelectOp::run(const Step& step, int64_t row, uint8_t*) {
    std::memcpy(out_.row(row), x_.row(step.logits_rows[row]), x_.width() * sizeof(float));
}

int64_t RmsNormOp::plan(const Step& step) { return x_.rows(step); }

void RmsNormOp::run(const Step&, int64_t row, uint8_t*) {
    kernels_.rms_norm(x_.row(row), weight_.data(), x_.width(), eps_, out_.row(row));
    for (Form form : forms_) out_.convert(form, kernels_, row, 0, out_.width());
}

int64_t ConvertOp::plan(const Step& step) { return x_.rows(step) * chunks_of(x_.width(), kConvertChunk); }

void ConvertOp::run(const Step&, int64_t chunk, uint8_t*) {
    const int64_t per_row = chunks_of(x_.width(), kConvertChunk);
    const int64_t begin = chunk % per_row * kConvertChunk;
    x_.convert(form_, kernels_, chunk / per_row, begin, std::min(begin + kConvertChunk, x_.width()));
}

AnglesOp::AnglesOp(std::vector<float> frequency, float magnitude, int64_t max_rows)
    : frequency_(std::move(frequency)), magnitude_(magnitude),
      table_(max_rows * 2 * pairs() * sizeof(float)) {}

int64_t AnglesOp::plan(const Step& step) { return step.rows(); }

void AnglesOp::run(const Step& step, int64_t row, uint8_t*) {
    float* cos = table_.as<float>() + row * 2 * pairs();
    const float position = static_cast<float>(step.position(row));
    for (int64_t i = 0; i < pairs(); ++i) {
        // In float, as the models were trained.
        const float angle = position * frequency_[i];
        cos[i] = std::cos(angle) * magnitude_;
        cos[pairs() + i] = std::sin(angle) * magnitude_;
    }
}

}  // namespace treadle
