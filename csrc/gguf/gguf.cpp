#include "gguf/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

namespace treadle::gguf {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

namespace {

constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kMaxKey = 65535;  // bytes; GGUF specification
constexpr uint64_t kMaxName = 64;    // bytes; GGUF specification
constexpr uint64_t kMaxAlignment = uint64_t{1} << 20;
constexpr uint64_t kMinEntry = 8 + 1 + 4 + 1;  // key length, key, kind, value
constexpr uint64_t kMinTensor =
    8 + 1 + 4 + 8 + 4 + 8;  // name length, name, dims, one dimension, type, offset

constexpr TensorType kTensorTypes[] = {
    {0, "F32", 1, 4},       {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},    {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},    {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110}, {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210},
    {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},       {25, "I16", 1, 2},
    {26, "I32", 1, 4},      {27, "I64", 1, 8},        {28, "F64", 1, 8},      {30, "BF16", 1, 2},
};

struct KindInfo {
    std::string_view name;
    uint64_t size;  // bytes of a number; 0: not a number
};

constexpr KindInfo kKinds[] = {
    {"uint8", 1}, {"int8", 1},   {"uint16", 2}, {"int16", 2},  {"uint32", 4}, {"int32", 4},   {"float32", 4},
    {"bool", 1},  {"string", 0}, {"array", 0},  {"uint64", 8}, {"int64", 8},  {"float64", 8},
};

bool is_control(char c) { return (c >= 0 && c < ' ') || c == 0x7F; }

std::string number(uint64_t value) { return std::to_string(value); }

// Text from the file for an error: printable ASCII, at most 80 bytes of it.
std::string quoted(std::string_view text) {
    std::string out = "'";
    for (const char c : text.substr(0, 80)) {
        if (c >= ' ' && c <= '~' && c != '\'' && c != '\\') {
            out += c;
        } else {
            constexpr char kHex[] = "0123456789abcdef";
            out += {'\\', 'x', kHex[static_cast<uint8_t>(c) >> 4], kHex[c & 15]};
        }
    }
    return out + (text.size() > 80 ? "...'" : "'");
}

class Parser {
public:
    Parser(Bytes file, std::string_view name) : file_(file), name_(name) {}

    Contents run() {
        header();
        metadata();
        tensors();
        return std::move(contents_);
    }

private:
    [[noreturn]] void fail(const std::string& what) const { throw Error(std::string(name_) + ": " + what); }

    uint64_t left() const { return file_.size() - at_; }

    // For `count` things of at least `bytes` each that do not fit into what is left.
    [[noreturn]] void truncated(uint64_t count, uint64_t bytes, const std::string& what) const {
        uint64_t end = 0;
        if (__builtin_mul_overflow(count, bytes, &end) || __builtin_add_overflow(end, at_, &end))
            end = UINT64_MAX;
        fail("file truncated: expected at least " + number(end) + " bytes, have " + number(file_.size()) +
             " (" + what + ")");
    }

    Bytes take(uint64_t bytes, const std::string& what) {
        if (bytes > left()) truncated(1, bytes, "reading " + what);
        const Bytes taken = file_.subspan(at_, bytes);
        at_ += bytes;
        return taken;
    }

    template <class T>
    T read(const std::string& what) {
        T value;
        std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
        return value;
    }

    std::string_view read_string(const std::string& what) {
        const auto length = read<uint64_t>(what);
        if (length > left()) truncated(length, 1, "length of " + what + " is " + number(length));
        const Bytes text = take(length, what);
        return {reinterpret_cast<const char*>(text.data()), text.size()};
    }

    void header() {
        if (file_.empty()) fail("the file is empty (0 bytes); a GGUF file has at least 24");
        const Bytes magic = take(4, "the magic");
        if (std::memcmp(magic.data(), "GGUF", 4) != 0) {
            fail("not a GGUF file: it starts with " +
                 quoted({reinterpret_cast<const char*>(magic.data()), magic.size()}) + ", not 'GGUF'");
        }
        contents_.version = read<uint32_t>("the version");
        if (contents_.version != 2 && contents_.version != 3) {
            if ((contents_.version & 0xFFFF) == 0) fail("big-endian GGUF files are not supported");
            fail("GGUF version " + number(contents_.version) + " is not supported; supported are 2 and 3");
        }
        tensor_count_ = read<uint64_t>("tensor_count");
        entry_count_ = read<uint64_t>("metadata_kv_count");
        check_count("metadata_kv_count", entry_count_, kMinEntry);
        check_count("tensor_count", tensor_count_, kMinTensor);
    }

    void check_count(const char* field, uint64_t count, uint64_t bytes_each) const {
        if (count > left() / bytes_each)
            truncated(count, bytes_each, std::string(field) + " is " + number(count));
    }

    void metadata() {
        std::unordered_set<std::string_view> keys;
        for (uint64_t i = 0; i < entry_count_; ++i) {
            const std::string_view key = read_string("metadata key " + number(i));
            if (key.empty()) fail("metadata key " + number(i) + " is empty");
            if (key.size() > kMaxKey) {
                fail("metadata key " + number(i) + " has " + number(key.size()) + " bytes; at most " +
                     number(kMaxKey) + " are allowed");
            }
            if (!std::ranges::all_of(key, [](char c) { return c >= ' ' && c <= '~'; })) {
                fail("metadata key " + number(i) + " " + quoted(key) + " is not printable ASCII");
            }
            if (!keys.insert(key).second) fail("metadata key " + quoted(key) + " appears twice");
            contents_.metadata.push_back({key, value(key)});
        }
    }

    Kind kind(const std::string& what) {
        const auto id = read<uint32_t>("the type of " + what);
        if (id >= std::size(kKinds)) {
            fail("type of " + what + " is " + number(id) + "; allowed are 0 (uint8) to 12 (float64)");
        }
        return static_cast<Kind>(id);
    }

    Value value(std::string_view key) {
        const std::string what = "metadata " + quoted(key);
        Value value{};
        value.kind = value.element = kind(what);
        value.count = 1;
        if (value.kind == Kind::array) {
            value.element = kind("the elements of " + what);
            if (value.element == Kind::array) fail(what + " is an array of arrays, which is not supported");
            value.count = read<uint64_t>("the length of " + what);
        }
        value.bytes = value.element == Kind::string ? strings(value.count, what) : numbers(value, what);
        return value;
    }

    Bytes numbers(const Value& value, const std::string& what) {
        const uint64_t size = kKinds[static_cast<uint32_t>(value.element)].size;
        if (value.count > left() / size) {
            truncated(value.count, size, "length of " + what + " is " + number(value.count));
        }
        const Bytes bytes = take(value.count * size, what);
        if (value.element == Kind::boolean) {
            for (const uint8_t b : bytes) {
                if (b > 1) fail(what + " is a bool of value " + number(b) + "; allowed are 0 and 1");
            }
        }
        return bytes;
    }

    Bytes strings(uint64_t count, const std::string& what) {
        if (count > left() / 8) truncated(count, 8, "length of " + what + " is " + number(count));
        const uint64_t start = at_;
        for (uint64_t i = 0; i < count; ++i) read_string(what);
        return file_.subspan(start, at_ - start);
    }

    uint64_t alignment() const {
        const Value* value = contents_.find("general.alignment");
        if (!value) return 32;
        if (value->kind != Kind::u32) {
            fail("general.alignment is of type " + std::string(kind_name(value->kind)) + "; expected uint32");
        }
        const uint64_t alignment = scalar<uint32_t>(*value);
        if (!std::has_single_bit(alignment) || alignment < 8 || alignment > kMaxAlignment) {
            fail("general.alignment is " + number(alignment) + "; allowed is a power of two from 8 to " +
                 number(kMaxAlignment));
        }
        return alignment;
    }

    void tensors() {
        check_count("tensor_count", tensor_count_, kMinTensor);
        const uint64_t align = alignment();
        std::vector<uint64_t> offsets;
        std::unordered_set<std::string_view> names;
        for (uint64_t i = 0; i < tensor_count_; ++i) {
            contents_.tensors.push_back(tensor_shape(i));
            const std::string_view name = contents_.tensors.back().name;
            if (!names.insert(name).second) fail("tensor " + quoted(name) + " appears twice");
            offsets.push_back(read<uint64_t>("the offset of tensor " + quoted(name)));
            if (offsets.back() % align != 0) {
                fail("offset of tensor " + quoted(name) + " is " + number(offsets.back()) +
                     ", not a multiple of the alignment " + number(align));
            }
        }
        const uint64_t data_start = at_ + (align - at_ % align) % align;
        for (size_t i = 0; i < offsets.size(); ++i) place(contents_.tensors[i], data_start, offsets[i]);
        check_overlaps();
    }

    // Name, shape and type of tensor `i`; its data is empty, but knows its size.
    Tensor tensor_shape(uint64_t i) {
        Tensor t{};
        t.name = read_string("the name of tensor " + number(i));
        const std::string what = "tensor " + quoted(t.name);
        if (t.name.empty()) fail("name of tensor " + number(i) + " is empty");
        if (t.name.size() > kMaxName) {
            fail(what + " has a name of " + number(t.name.size()) + " bytes; at most " + number(kMaxName) +
                 " are allowed");
        }
        if (!valid_utf8(t.name) || std::ranges::any_of(t.name, is_control)) {
            fail(what + " has a name that is not printable UTF-8");
        }
        const auto dims = read<uint32_t>("the number of dimensions of " + what);
        if (dims == 0 || dims > kMaxDims) {
            fail(what + " has " + number(dims) + " dimensions; allowed are 1 to " + number(kMaxDims));
        }
        t.dims = static_cast<int>(dims);
        t.ne.fill(1);
        for (uint32_t d = 0; d < dims; ++d) {
            t.ne[d] = read<uint64_t>("dimension " + number(d) + " of " + what);
            if (t.ne[d] == 0) fail(what + " has size 0 in dimension " + number(d) + "; expected at least 1");
        }
        t.type = tensor_type(what);
        if (t.ne[0] % t.type->block != 0) {
            fail(what + " of type " + std::string(t.type->name) + " has rows of " + number(t.ne[0]) +
                 " values; expected a multiple of " + number(t.type->block));
        }
        return t;
    }

    const TensorType* tensor_type(const std::string& what) {
        const auto id = read<uint32_t>("the type of " + what);
        std::string known;
        for (const TensorType& type : kTensorTypes) {
            if (type.id == id) return &type;
            if (!known.empty()) known += ' ';
            known += type.name;
        }
        fail(what + " has type number " + number(id) + ", which is not supported; supported are " + known);
    }

    uint64_t byte_size(const Tensor& t) const {
        uint64_t bytes = t.ne[0] / t.type->block;
        for (const uint64_t factor : {uint64_t{t.type->bytes}, t.ne[1], t.ne[2], t.ne[3]}) {
            if (__builtin_mul_overflow(bytes, factor, &bytes)) {
                std::string shape = number(t.ne[0]);
                for (int d = 1; d < t.dims; ++d) shape += " x " + number(t.ne[d]);
                fail("tensor " + quoted(t.name) + " of shape " + shape + " is larger than 2^64 bytes");
            }
        }
        return bytes;
    }

    void place(Tensor& t, uint64_t data_start, uint64_t offset) const {
        const uint64_t bytes = byte_size(t);
        uint64_t start = 0, end = 0;
        if (__builtin_add_overflow(data_start, offset, &start) ||
            __builtin_add_overflow(start, bytes, &end)) {
            fail("offset of tensor " + quoted(t.name) + " is " + number(offset) +
                 ", beyond any file; the file has " + number(file_.size()) + " bytes");
        }
        if (end > file_.size()) {
            fail("file truncated: expected " + number(end) + " bytes, have " + number(file_.size()) +
                 " (tensor " + quoted(t.name) + " at offset " + number(offset) + " has " + number(bytes) +
                 " bytes)");
        }
        t.data = file_.subspan(start, bytes);
    }

    void check_overlaps() const {
        std::vector<const Tensor*> order;
        for (const Tensor& t : contents_.tensors) order.push_back(&t);
        std::ranges::sort(order, {}, [](const Tensor* t) { return t->data.data(); });
        for (size_t i = 1; i < order.size(); ++i) {
            const Bytes before = order[i - 1]->data;
            if (before.data() + before.size() > order[i]->data.data()) {
                fail("data of tensor " + quoted(order[i]->name) + " overlaps that of tensor " +
                     quoted(order[i - 1]->name));
            }
        }
    }

    Bytes file_;
    std::string_view name_;
    uint64_t at_ = 0;
    uint64_t tensor_count_ = 0;
    uint64_t entry_count_ = 0;
    Contents contents_;
};

}  // namespace

std::span<const TensorType> tensor_types() { return kTensorTypes; }

std::string_view kind_name(Kind kind) { return kKinds[static_cast<uint32_t>(kind)].name; }

const Value* Contents::find(std::string_view key) const {
    const auto entry = std::ranges::find(metadata, key, &Entry::key);
    return entry == metadata.end() ? nullptr : &entry->value;
}

Contents parse(Bytes file, std::string_view name) { return Parser(file, name).run(); }

std::string_view next_string(Bytes& bytes) {
    uint64_t length;
    std::memcpy(&length, bytes.data(), sizeof(length));
    const Bytes text = bytes.subspan(sizeof(length), length);
    bytes = bytes.subspan(sizeof(length) + length);
    return {reinterpret_cast<const char*>(text.data()), text.size()};
}

// Table 3-7 of the Unicode standard: no overlong forms, no surrogates, nothing above U+10FFFF.
bool valid_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<uint8_t>(text[i]);
        const int more = lead < 0x80   ? 0
                         : lead < 0xC2 ? -1
                         : lead < 0xE0 ? 1
                         : lead < 0xF0 ? 2
                         : lead < 0xF5 ? 3
                                       : -1;
        if (more < 0 || static_cast<size_t>(more) >= text.size() - i) return false;
        for (int k = 1; k <= more; ++k) {
            const auto byte = static_cast<uint8_t>(text[i + k]);
            const uint8_t low = k > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
            const uint8_t high = k > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
            if (byte < low || byte > high) return false;
        }
        i += 1 + more;
    }
    return true;
}

}  // namespace treadle::gguf
