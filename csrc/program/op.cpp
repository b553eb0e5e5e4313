#include "program/op.h"

namespace treadle {

Buffer::Buffer(int64_t max_rows, int64_t width, bool logits)
    : max_rows_(max_rows), width_(width),
      // A multiple of 4096 bytes between rows would put all rows of a tile into the same cache sets. Rows of
      // logits lie close together, as their readers expect.
      stride_(logits ? width : (width + 31) / 32 * 32 + 16), groups32_((width / 32 + 7) / 8 * 8),
      logits_(logits), floats_(Memory::resident(max_rows * stride_ * sizeof(float))) {}

void Buffer::need(Form form) {
    if (form == Form::floats) return;
    if (form == Form::bf16) {
        if (bf16_.size() == 0) bf16_ = Memory::resident(max_rows_ * stride_ * sizeof(uint16_t));
        return;
    }
    Integers& to = integers_[static_cast<int>(form) - 2];
    if (to.q.size() != 0) return;
    const int64_t groups = max_rows_ * groups32_;
    to.q = Memory::resident(max_rows_ * stride_);
    if (form == Form::two_bytes_32) to.low = Memory::resident(max_rows_ * stride_);
    to.scale = Memory::resident(groups * sizeof(float));
    if (form != Form::int8_256) to.sum = Memory::resident(groups * sizeof(float));
    to.neg32 = Memory::resident(groups * sizeof(int32_t));
    to.neg16 = Memory::resident(groups * 2 * sizeof(int32_t));
    to.words = Memory::resident(groups * sizeof(int16_t));
}

void Buffer::convert(Form form, const RowKernels& kernels, int64_t index, int64_t begin, int64_t end) const {
    const float* x = row(index) + begin;
    if (form == Form::bf16) kernels.to_bf16(x, end - begin, bf16_.as<uint16_t>() + index * stride_ + begin);
    if (form == Form::floats || form == Form::bf16) return;
    const Integers& from = integers(form);
    const int scale_k = form == Form::int8_256 ? 256 : 32;
    const int64_t group = index * groups32_ + begin / 32;
    const QuantisedRow out{
        .q = from.q.as<int8_t>() + index * stride_ + begin,
        .low = form == Form::two_bytes_32 ? from.low.as<int8_t>() + index * stride_ + begin : nullptr,
        .scale = from.scale.as<float>() + index * groups32_ + begin / scale_k,
        .sum = form != Form::int8_256 ? from.sum.as<float>() + group : nullptr,
        .neg32 = from.neg32.as<int32_t>() + group,
        .neg16 = from.neg16.as<int32_t>() + 2 * group,
        .words = from.words.as<int16_t>() + group,
    };
    kernels.quantise(x, end - begin, scale_k, out);
}

Quantised Buffer::quantised(Form form, int64_t index) const {
    const Integers& from = integers(form);
    const int64_t group = index * groups32_;
    return {
        .scale_k = form == Form::int8_256 ? 256 : 32,
        .q = from.q.as<int8_t>() + index * stride_,
        .low = form == Form::two_bytes_32 ? from.low.as<int8_t>() + index * stride_ : nullptr,
        .scale = from.scale.as<float>() + group,
        .sum = form != Form::int8_256 ? from.sum.as<float>() + group : nullptr,
        .neg32 = from.neg32.as<int32_t>() + group,
        .neg16 = from.neg16.as<int32_t>() + 2 * group,
        .words = from.words.as<int16_t>() + group,
        .q_stride = stride_,
        .groups32 = groups32_,
    };
}

}  // namespace treadle
