#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "base/isa.h"
#include "program/program.h"
#include "quant/decode.h"
#include "quant/pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace treadle {

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Raw = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Format parse_format(const std::string& name) {
    if (const auto format = format_from_name(name)) return *format;
    std::string known;
    for (const FormatInfo& f : kFormatInfo) known += (known.empty() ? "" : ", ") + std::string(f.name);
    throw std::invalid_argument("weight format " + name + " is not supported; supported are " + known);
}

std::vector<float> to_vector(const Floats& values) { return {values.data(), values.data() + values.size()}; }

std::shared_ptr<Matrix> pack_matrix(Pool& pool, const std::string& format_name, const Raw& data, int64_t rows,
                                    int64_t cols, bool mapped) {
    const Format format = parse_format(format_name);
    if (rows <= 0 || cols <= 0 || cols % info(format).block_k != 0 ||
        data.size() != file_bytes(format, cols) * rows)
        throw std::invalid_argument("a " + format_name + " matrix of " + std::to_string(rows) + " x " +
                                    std::to_string(cols) + " does not have " + std::to_string(data.size()) +
                                    " bytes");
    const nb::gil_scoped_release release;
    return std::make_shared<Matrix>(pack(pool, format, data.data(), rows, cols, mapped));
}

// A matrix that was packed before, in `data`.
std::shared_ptr<Matrix> packed_matrix(const std::string& format_name, const Raw& data, int64_t rows,
                                      int64_t cols) {
    Matrix matrix{parse_format(format_name), rows, cols, data.data(), std::make_shared<Raw>(data)};
    if (rows <= 0 || cols <= 0 || cols % info(matrix.format).block_k != 0 || data.size() != matrix.bytes())
        throw std::invalid_argument("a packed " + format_name + " matrix of " + std::to_string(rows) + " x " +
                                    std::to_string(cols) + " does not have " + std::to_string(data.size()) +
                                    " bytes");
    if (reinterpret_cast<uintptr_t>(data.data()) % kPackedAlign != 0)
        throw std::invalid_argument("packed data must begin at a multiple of " +
                                    std::to_string(kPackedAlign));
    return std::make_shared<Matrix>(std::move(matrix));
}

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// x [m][k] through one matrix, alone: for tests and benchmarks.
class LinearProbe {
public:
    LinearProbe(std::shared_ptr<Pool> pool, const std::string& isa, std::shared_ptr<Matrix> matrix,
                int64_t rows, bool two_bytes)
        : program_(std::move(pool), isa_from_name(isa), {rows, 1, 1}, two_bytes) {
        x_ = program_.buffer(matrix->cols, false);
        y_ = program_.buffer(matrix->rows, false);
        program_.linear(x_, {std::move(matrix)}, {}, -1, y_);
        step_.tokens.assign(rows, 0);
        step_.row_sequence.assign(rows, 0);
    }

    void set(const Rows& x) {
        const Buffer& buffer = program_.at(x_);
        if (static_cast<int64_t>(x.shape(0)) != step_.rows() ||
            static_cast<int64_t>(x.shape(1)) != buffer.width())
            throw std::invalid_argument("x must have the rows and columns that the probe was made for");
        for (int64_t row = 0; row < step_.rows(); ++row)
            std::memcpy(buffer.row(row), x.data() + row * buffer.width(), buffer.width() * sizeof(float));
    }

    void run() {
        program_.run(step_, [] { return false; });
    }

    const Buffer& result() const { return program_.at(y_); }
    int64_t rows() const { return step_.rows(); }

private:
    Program program_;
    int x_, y_;
    Step step_;
};

nb::ndarray<nb::numpy, float> linear(std::shared_ptr<Pool> pool, const std::string& isa,
                                     std::shared_ptr<Matrix> matrix, const Rows& x, bool two_bytes) {
    LinearProbe probe(std::move(pool), isa, std::move(matrix), static_cast<int64_t>(x.shape(0)), two_bytes);
    probe.set(x);
    {
        const nb::gil_scoped_release release;
        probe.run();
    }
    const size_t rows = x.shape(0), width = probe.result().width();
    float* out = new float[rows * width];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    for (size_t row = 0; row < rows; ++row)
        std::memcpy(out + row * width, probe.result().row(row), width * sizeof(float));
    return {out, {rows, width}, owner};
}

// Seconds per call, over at least `seconds` of calls.
double bench_linear(std::shared_ptr<Pool> pool, std::shared_ptr<Matrix> matrix, int64_t rows,
                    double seconds) {
    const nb::gil_scoped_release release;
    LinearProbe probe(std::move(pool), std::string(isa_name(select_isa())), std::move(matrix), rows, false);
    probe.run();
    const auto start = std::chrono::steady_clock::now();
    for (int64_t calls = 1;; ++calls) {
        probe.run();
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        if (elapsed.count() >= seconds) return elapsed.count() / static_cast<double>(calls);
    }
}

nb::ndarray<nb::numpy, float> dequantise_array(const std::string& format_name, const Raw& data) {
    const Format format = parse_format(format_name);
    const FormatInfo& f = info(format);
    if (data.size() % f.block_bytes != 0)
        throw std::invalid_argument(std::to_string(data.size()) + " bytes are not a whole number of " +
                                    format_name + " blocks of " + std::to_string(f.block_bytes));
    const size_t count = data.size() / f.block_bytes * f.block_k;
    float* out = new float[count];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    dequantise(format, data.data(), static_cast<int64_t>(count), out);
    return {out, {count}, owner};
}

// The int32 arrays of one step, see Program.run in _native.pyi.
struct StepArrays {
    Ints tokens, query_lens, past_lens, slots, logits_rows;
    Table tables;
};

Step make_step(const StepArrays& in) {
    const auto& [tokens, query_lens, past_lens, slots, logits_rows, tables] = in;
    const size_t sequences = query_lens.size();
    if (past_lens.size() != sequences || slots.size() != sequences)
        throw std::invalid_argument("query_lens, past_lens and slots must name the same sequences");
    Step step;
    step.tokens.assign(tokens.data(), tokens.data() + tokens.size());
    step.logits_rows.assign(logits_rows.data(), logits_rows.data() + logits_rows.size());
    step.row_sequence.reserve(tokens.size());
    int64_t row = 0;
    for (size_t s = 0; s < sequences; ++s) {
        const int64_t length = query_lens.data()[s], past = past_lens.data()[s];
        const int64_t room = static_cast<int64_t>(tables.shape(1)) * kBlock;
        const int64_t slot = slots.data()[s];
        if (slot < 0 || slot >= static_cast<int64_t>(tables.shape(0)))
            throw std::invalid_argument("slot " + std::to_string(slot) + " is outside the " +
                                        std::to_string(tables.shape(0)) + " tables");
        if (length <= 0 || past < 0 || past + length > room)
            throw std::invalid_argument("sequence " + std::to_string(s) + ": " + std::to_string(past) +
                                        " past and " + std::to_string(length) +
                                        " new tokens do not fit a table of " +
                                        std::to_string(tables.shape(1)) + " blocks");
        step.sequences.push_back({row, length, past, tables.data() + slot * tables.shape(1)});
        step.row_sequence.insert(step.row_sequence.end(), length, static_cast<int32_t>(s));
        row += length;
    }
    if (row != static_cast<int64_t>(tokens.size()))
        throw std::invalid_argument("query_lens add up to " + std::to_string(row) + ", but there are " +
                                    std::to_string(tokens.size()) + " tokens");
    return step;
}

// Ctrl-C: ask Python, which needs the GIL, and leave the exception set for the caller.
bool signal_pending() {
    const nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

void run(Program& program, const Ints& tokens, const Ints& query_lens, const Ints& past_lens,
         const Ints& slots, const Ints& logits_rows, const Table& tables) {
    Step step = make_step({tokens, query_lens, past_lens, slots, logits_rows, tables});
    bool finished;
    {
        const nb::gil_scoped_release release;
        finished = program.run(std::move(step), signal_pending);
    }
    if (!finished) throw nb::python_error();
}

nb::ndarray<nb::numpy, uint8_t> read_block(const Program& program, int64_t block) {
    auto* data = new uint8_t[program.block_bytes()];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    program.read_block(block, data);
    return {data, {program.block_bytes()}, owner};
}

void write_block(Program& program, int64_t block, const Raw& data) {
    if (data.size() != program.block_bytes())
        throw std::invalid_argument("a cache block has " + std::to_string(program.block_bytes()) +
                                    " bytes, not " + std::to_string(data.size()));
    program.write_block(block, data.data());
}

nb::ndarray<nb::numpy, const float> rows_of(nb::handle self, int index) {
    const Program& program = nb::cast<const Program&>(self);
    const Buffer& buffer = program.at(index);
    return {buffer.row(0),
            {static_cast<size_t>(buffer.rows(program.step())), static_cast<size_t>(buffer.width())},
            nb::borrow(self),
            {buffer.stride(), 1}};
}

}  // namespace

void bind_program(nb::module_& m) {
    m.def("isa", [] { return std::string(isa_name(select_isa())); });
    m.def("isas", [] {
        std::vector<std::string> names;
        for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
    });
    m.attr("BLOCK") = kBlock;
    m.def(
        "kv_block_bytes",
        [](const std::string& kv_dtype, int kv_heads, int head_dim) {
            return kv_heads * head_block_bytes(kv_type_from_name(kv_dtype), head_dim);
        },
        "kv_dtype"_a, "kv_heads"_a, "head_dim"_a);
    m.def("dequantise", &dequantise_array, "format"_a, "data"_a);
    m.def(
        "packed_bytes",
        [](const std::string& format, int64_t rows, int64_t cols) {
            return (rows + kPanel - 1) / kPanel *
                   static_cast<int64_t>(panel_bytes(parse_format(format), cols));
        },
        "format"_a, "rows"_a, "cols"_a);
    nb::class_<Matrix>(m, "Matrix")
        .def_prop_ro("rows", [](const Matrix& matrix) { return matrix.rows; })
        .def_prop_ro("cols", [](const Matrix& matrix) { return matrix.cols; })
        .def_prop_ro("format", [](const Matrix& matrix) { return std::string(info(matrix.format).name); })
        .def_prop_ro("nbytes", &Matrix::bytes)
        .def_prop_ro(
            "data",
            [](const std::shared_ptr<Matrix>& matrix) {
                return nb::ndarray<nb::numpy, const uint8_t>(matrix->data, {matrix->bytes()},
                                                             nb::cast(matrix));
            },
            nb::sig("def data(self) -> NDArray[np.uint8]"));
    m.def("pack", &pack_matrix, "pool"_a, "format"_a, "data"_a, "rows"_a, "cols"_a, "mapped"_a = false);
    m.attr("PACKED_LAYOUT") = kPackedLayout;
    m.def("packed", &packed_matrix, "format"_a, "data"_a, "rows"_a, "cols"_a);
    m.def(
        "copied",
        [](Pool& pool, const Matrix& matrix) {
            const nb::gil_scoped_release release;
            return std::make_shared<Matrix>(copy(pool, matrix));
        },
        "pool"_a, "matrix"_a);
    m.def(
        "checksum",
        [](Pool& pool, const Raw& data) {
            const nb::gil_scoped_release release;
            return checksum(pool, data.data(), data.size());
        },
        "pool"_a, "data"_a);
    m.def("linear", &linear, "pool"_a, "isa"_a, "matrix"_a, "x"_a, "two_bytes"_a = false);
    m.def("bench_linear", &bench_linear, "pool"_a, "matrix"_a, "rows"_a, "seconds"_a);
    nb::class_<Program>(m, "Program")
        .def(
            "__init__",
            [](Program* self, std::shared_ptr<Pool> pool, const std::string& isa, int64_t max_tokens,
               int64_t max_logits, int64_t blocks, bool two_bytes, const std::string& kv_dtype) {
                new (self) Program(std::move(pool), isa_from_name(isa), {max_tokens, max_logits, blocks},
                                   two_bytes, kv_type_from_name(kv_dtype));
            },
            "pool"_a, "isa"_a, "max_tokens"_a, "max_logits"_a, "blocks"_a, "two_bytes"_a,
            "kv_dtype"_a = "bf16")
        .def("buffer", &Program::buffer, "width"_a, "logits"_a = false)
        .def(
            "embed",
            [](Program& self, const std::string& format, const Raw& table, int64_t rows, int out) {
                self.embed(parse_format(format), {table.data(), table.size()}, rows, out);
            },
            // the program reads the table while it lives
            nb::keep_alive<1, 3>(), "format"_a, "table"_a, "rows"_a, "out"_a)
        .def("select", &Program::select, "x"_a, "out"_a)
        .def(
            "rms_norm",
            [](Program& self, int x, const Floats& weight, float eps, int out) {
                self.rms_norm(x, to_vector(weight), eps, out);
            },
            "x"_a, "weight"_a, "eps"_a, "out"_a)
        .def(
            "linear",
            [](Program& self, int x, const std::vector<std::shared_ptr<Matrix>>& parts,
               const std::optional<Floats>& bias, int residual, int out) {
                self.linear(x, {parts.begin(), parts.end()}, bias ? to_vector(*bias) : std::vector<float>{},
                            residual, out);
            },
            "x"_a, "parts"_a, "bias"_a.none() = nb::none(), "residual"_a = -1, nb::kw_only(), "out"_a)
        .def(
            "gated_linear",
            [](Program& self, int x, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, int out) {
                self.gated_linear(x, std::move(gate), std::move(up), out);
            },
            "x"_a, "gate"_a, "up"_a, "out"_a)
        .def(
            "angles",
            [](Program& self, const Floats& frequency, float magnitude) {
                self.angles(to_vector(frequency), magnitude);
            },
            "frequency"_a, "magnitude"_a = 1.0f)
        .def(
            "attention",
            [](Program& self, int qkv, std::tuple<int, int, int> shape, bool neox,
               const std::optional<Floats>& q_norm, const std::optional<Floats>& k_norm, float eps, int out) {
                const auto [heads, kv_heads, head_dim] = shape;
                CacheOp::HeadNorm norm{{}, {}, eps};
                if (q_norm) norm.q = to_vector(*q_norm);
                if (k_norm) norm.k = to_vector(*k_norm);
                self.attention(qkv, {heads, kv_heads, head_dim}, neox, std::move(norm), out);
            },
            "qkv"_a, "shape"_a, nb::kw_only(), "neox"_a, "q_norm"_a.none() = nb::none(),
            "k_norm"_a.none() = nb::none(), "eps"_a = 1e-6f, "out"_a)
        .def("run", &run, "tokens"_a, "query_lens"_a, "past_lens"_a, "slots"_a, "logits_rows"_a, "tables"_a)
        .def("rows", &rows_of, "buffer"_a, nb::sig("def rows(self, buffer: int) -> NDArray[np.float32]"))
        .def_prop_ro("cache_bytes", &Program::cache_bytes)
        .def_prop_ro("block_bytes", &Program::block_bytes)
        .def("read_block", &read_block, "block"_a,
             nb::sig("def read_block(self, block: int) -> NDArray[np.uint8]"))
        .def("write_block", &write_block, "block"_a, "data"_a);
}

}  // namespace treadle
