// Single kernels on a named ISA, for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/rows/rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace treadle {

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Limits = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An array for Python: its memory, and the NumPy view that owns it.
template <class T>
std::pair<T*, nb::object> new_array(std::initializer_list<size_t> shape) {
    size_t count = 1;
    for (size_t size : shape) count *= size;
    T* data = new T[count]();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return {data, nb::cast(nb::ndarray<nb::numpy, T>(data, shape, owner))};
}

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

nb::object rows_rms_norm(const std::string& isa, const Floats& x, const Floats& weight, float eps) {
    require(x.size() > 0 && x.size() == weight.size(), "x and weight must have the same size, at least 1");
    auto [out, array] = new_array<float>({x.size()});
    row_kernels(isa_from_name(isa))
        .rms_norm(x.data(), weight.data(), static_cast<int64_t>(x.size()), eps, out);
    return array;
}

nb::tuple rows_quantise(const std::string& isa, const Floats& x, int scale_k, bool two_bytes) {
    const size_t n = x.size();
    require(n > 0 && n % 32 == 0 && (scale_k == 32 || scale_k == 256),
            "x must have a multiple of 32 values and scale_k be 32 or 256");
    auto [q, q_array] = new_array<int8_t>({n});
    auto [low, low_array] = new_array<int8_t>({n});
    auto [scale, scale_array] = new_array<float>({(n + scale_k - 1) / scale_k});
    auto [sum, sum_array] = new_array<float>({n / 32});
    auto [neg32, neg32_array] = new_array<int32_t>({n / 32});
    auto [neg16, neg16_array] = new_array<int32_t>({n / 16});
    auto [words, words_array] = new_array<int16_t>({n / 32});
    row_kernels(isa_from_name(isa))
        .quantise(x.data(), static_cast<int64_t>(n), scale_k,
                  {q, two_bytes ? low : nullptr, scale, scale_k == 32 ? sum : nullptr, neg32, neg16, words});
    return nb::make_tuple(q_array, low_array, scale_array, sum_array, neg32_array, neg16_array, words_array);
}

nb::object rows_rope(const std::string& isa, const Floats& x, const Floats& cos, const Floats& sin,
                     bool neox) {
    require(x.size() == 2 * cos.size() && cos.size() == sin.size(),
            "cos and sin must have half the size of x");
    auto [out, array] = new_array<float>({x.size()});
    std::copy_n(x.data(), x.size(), out);
    row_kernels(isa_from_name(isa)).rope(out, static_cast<int64_t>(x.size()), cos.data(), sin.data(), neox);
    return array;
}

nb::object rows_swiglu(const std::string& isa, const Floats& gate, const Floats& up) {
    require(gate.size() == up.size(), "gate and up must have the same size");
    auto [out, array] = new_array<float>({up.size()});
    row_kernels(isa_from_name(isa)).swiglu(gate.data(), up.data(), static_cast<int64_t>(up.size()), out);
    return array;
}

nb::object rows_to_bf16(const std::string& isa, const Floats& x) {
    auto [out, array] = new_array<uint16_t>({x.size()});
    row_kernels(isa_from_name(isa)).to_bf16(x.data(), static_cast<int64_t>(x.size()), out);
    return array;
}

// As AttentionOp does it for one kv head: rotate, store, all splits, merge, divide, rotate back. Blocks lie
// in reverse order with room between them, and unused slots hold `stale`.
nb::object attention(const std::string& isa, const FloatRows& query, const Limits& limit,
                     const FloatRows& keys, const FloatRows& values, uint16_t stale,
                     const std::string& kv_dtype) {
    const size_t rows = query.shape(0), dim = query.shape(1), tokens = keys.shape(0);
    require(rows > 0 && rows <= kMaxAttentionRows && limit.size() == rows,
            "1 to 32 rows, each with its limit");
    require(dim > 0 && dim % 16 == 0 && keys.shape(1) == dim && values.shape(1) == dim &&
                values.shape(0) == tokens && tokens > 0,
            "query, keys and values must have the same width, a multiple of 16");
    for (size_t r = 0; r < rows; ++r)
        require(limit.data()[r] > 0 && limit.data()[r] <= static_cast<int64_t>(tokens),
                "every row must see at least one of the keys");
    const KvType type = kv_type_from_name(kv_dtype);
    const AttentionKernels kernels = attention_kernels(isa_from_name(isa), type);
    const int head_dim = static_cast<int>(dim);
    const auto rotated = [&](const float* from) {
        std::vector<float> head(from, from + dim);
        if (kernels.rotate) kernels.rotate(head.data(), head_dim);
        return head;
    };
    const size_t blocks = (tokens + kBlock - 1) / kBlock;
    const size_t stride = head_block_bytes(type, head_dim) + 2 * dim;
    std::vector<uint16_t> room(blocks * stride / 2, stale);
    auto* cache = reinterpret_cast<uint8_t*>(room.data());
    std::vector<int32_t> table(blocks);
    for (size_t b = 0; b < blocks; ++b) table[b] = static_cast<int32_t>(blocks - 1 - b);
    for (size_t t = 0; t < tokens; ++t)
        kernels.store(rotated(keys.data() + t * dim).data(), rotated(values.data() + t * dim).data(),
                      head_dim, cache + table[t / kBlock] * stride, static_cast<int>(t % kBlock));

    std::vector<uint8_t> narrow(rows * query_bytes(type, head_dim));
    std::vector<const uint8_t*> query_rows(rows);
    for (size_t r = 0; r < rows; ++r) {
        uint8_t* to = narrow.data() + r * query_bytes(type, head_dim);
        kernels.query(rotated(query.data() + r * dim).data(), head_dim, to);
        query_rows[r] = to;
    }
    auto [out, array] = new_array<float>({rows, dim});
    std::vector<float> max(rows), sum(rows), next_max(rows), next_sum(rows), next(rows * dim);
    AttentionSplit split{
        .query = query_rows.data(),
        .limit = limit.data(),
        .rows = static_cast<int>(rows),
        .head_dim = head_dim,
        .scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(dim))),
        .cache = cache,
        .block_stride = static_cast<int64_t>(stride),
        .table = table.data(),
        .begin = 0,
        .end = 0,
        .max = max.data(),
        .sum = sum.data(),
        .out = out,
    };
    for (size_t begin = 0; begin < tokens; begin += kSplit) {
        split.begin = static_cast<int64_t>(begin);
        split.end = static_cast<int64_t>(std::min<size_t>(begin + kSplit, tokens));
        if (begin > 0) split.max = next_max.data(), split.sum = next_sum.data(), split.out = next.data();
        kernels.split(split);
        for (size_t r = 0; begin > 0 && r < rows; ++r)
            kernels.merge(&max[r], &sum[r], out + r * dim, next_max[r], next_sum[r], next.data() + r * dim,
                          head_dim);
    }
    for (size_t r = 0; r < rows; ++r) {
        for (size_t d = 0; d < dim; ++d) out[r * dim + d] /= sum[r];
        if (kernels.rotate) kernels.rotate(out + r * dim, head_dim);
    }
    return array;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def("rows_rms_norm", &rows_rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a);
    m.def("rows_quantise", &rows_quantise, "isa"_a, "x"_a, "scale_k"_a, "two_bytes"_a);
    m.def("rows_rope", &rows_rope, "isa"_a, "x"_a, "cos"_a, "sin"_a, "neox"_a);
    m.def("rows_swiglu", &rows_swiglu, "isa"_a, "gate"_a, "up"_a);
    m.def("rows_to_bf16", &rows_to_bf16, "isa"_a, "x"_a);
    m.def("attention", &attention, "isa"_a, "query"_a, "limit"_a, "keys"_a, "values"_a, "stale"_a = 0,
          "kv_dtype"_a = "bf16");
}

}  // namespace treadle
