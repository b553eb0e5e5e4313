// Reader of GGUF model files, versions 2 and 3, little endian.
//
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
//
// A file is an adversary until it is parsed: every count, length, type, offset and product is checked against
// the bytes that are there before it is used, and nothing is allocated that the file does not pay for with
// bytes of its own.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace treadle::gguf {

using Bytes = std::span<const uint8_t>;

// One line: the file, the field, its value, what is allowed. May hold any bytes of a path; the rest is ASCII.
class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Element type of a tensor, as numbered in files.
struct TensorType {
    uint32_t id;
    std::string_view name;
    uint32_t block;  // values per block
    uint32_t bytes;  // bytes per block
};

std::span<const TensorType> tensor_types();

// Type of a metadata value, as numbered in files.
enum class Kind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

std::string_view kind_name(Kind kind);

// A metadata value, still in the file's bytes.
struct Value {
    Kind kind;
    Kind element;    // of an array; else equal to kind
    uint64_t count;  // elements of an array; else 1
    Bytes bytes;     // numbers packed without alignment; strings each with its 64-bit length before it
};

struct Entry {
    std::string_view key;  // in the file's bytes; ASCII without control characters
    Value value;
};

struct Tensor {
    std::string_view name;  // in the file's bytes; UTF-8 without control characters
    const TensorType* type;
    int dims;                    // 1..4
    std::array<uint64_t, 4> ne;  // the contiguous dimension first; 1 beyond dims
    Bytes data;
};

// What one file holds. Everything points into the bytes that were parsed.
struct Contents {
    uint32_t version = 0;
    std::vector<Entry> metadata;
    std::vector<Tensor> tensors;

    const Value* find(std::string_view key) const;
};

// `name` stands for the file in errors. Throws Error.
Contents parse(Bytes file, std::string_view name);

bool valid_utf8(std::string_view text);

// Takes the next string off the front of a checked Value's bytes.
std::string_view next_string(Bytes& bytes);

// The number in a checked scalar Value.
template <class T>
T scalar(const Value& value) {
    T number;
    __builtin_memcpy(&number, value.bytes.data(), sizeof(T));
    return number;
}

// A whole file, mapped read-only. The file must not shrink while it is mapped.
class Mapping {
public:
    explicit Mapping(const std::filesystem::path& path);  // throws Error
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&&) = delete;

    Bytes bytes() const { return bytes_; }

private:
    Bytes bytes_;
};

// A model of one file, or of all files `NAME-00001-of-0000N.gguf` when `path` is the first of them.
class Model {
public:
    explicit Model(const std::filesystem::path& path);  // throws Error

    const std::vector<Entry>& metadata() const { return first_.metadata; }
    const std::vector<Tensor>& tensors() const { return tensors_; }

private:
    void add_splits(const std::filesystem::path& first, uint64_t count);

    std::vector<Mapping> mappings_;
    Contents first_;  // its metadata describes the whole model
    std::vector<Tensor> tensors_;
};

}  // namespace treadle::gguf
