// Operations of a program and the activations between them.
#pragma once

#include <cstdint>

#include "base/memory.h"
#include "kernels/rows/quantised.h"
#include "kernels/rows/rows.h"
#include "program/step.h"

namespace treadle {

// The forms of an activation that linear kernels read.
enum class Form { floats, bf16, int8_32, int8_256, two_bytes_32 };

// Activations [rows][width] in float, and further forms of the same values that were asked for.
class Buffer {
public:
    // `logits`: one row per wanted logits row of the step, rather than one per token.
    Buffer(int64_t max_rows, int64_t width, bool logits);

    int64_t width() const { return width_; }
    bool logits() const { return logits_; }
    int64_t rows(const Step& step) const {
        return logits_ ? static_cast<int64_t>(step.logits_rows.size()) : step.rows();
    }
    int64_t stride() const { return stride_; }
    float* row(int64_t index) const { return floats_.as<float>() + index * stride_; }

    // Makes room for a form; later calls do nothing.
    void need(Form form);
    // Computes a form of values [begin, end) of a row; both are multiples of 256 or the width.
    void convert(Form form, const RowKernels& kernels, int64_t row, int64_t begin, int64_t end) const;

    const uint16_t* bf16_row(int64_t index) const { return bf16_.as<uint16_t>() + index * stride_; }
    // An integer form from row `row` on.
    Quantised quantised(Form form, int64_t row) const;

private:
    // One allocation per array of Quantised.
    struct Integers {
        Memory q, low, scale, sum, neg32, neg16, words;
    };
    const Integers& integers(Form form) const { return integers_[static_cast<int>(form) - 2]; }

    int64_t max_rows_, width_, stride_, groups32_;
    bool logits_;
    Memory floats_, bf16_;
    Integers integers_[3];
};

// A step of the program. Chunks of one operation run in any order on any worker; operations follow one
// another.
class Op {
public:
    virtual ~Op() = default;
    // Called by one thread before the program runs: how many chunks this step has.
    virtual int64_t plan(const Step& step) = 0;
    // `scratch` is the worker's own memory, kScratchBytes long.
    virtual void run(const Step& step, int64_t chunk, uint8_t* scratch) = 0;
};

}  // namespace treadle
