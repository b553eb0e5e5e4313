// Model files on disk: memory maps, and models split into several files.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "gguf/gguf.h"

namespace treadle::gguf {

namespace {

constexpr uint64_t kMaxSplits = 99999;  // five digits in the file name

[[noreturn]] void fail_system(const std::filesystem::path& path, const char* what) {
    throw Error(path.string() + ": cannot " + what + ": " + std::strerror(errno));
}

std::string split_suffix(uint64_t number, uint64_t count) {
    char suffix[64];
    std::snprintf(suffix, sizeof(suffix), "-%05llu-of-%05llu.gguf", static_cast<unsigned long long>(number),
                  static_cast<unsigned long long>(count));
    return suffix;
}

// A whole number of any integer type under `key`, or `missing`.
uint64_t integer(const Contents& contents, const char* key, uint64_t missing,
                 const std::filesystem::path& path) {
    const Value* value = contents.find(key);
    if (!value) return missing;
    int64_t number = -1;
    switch (value->kind) {
    case Kind::u8: number = scalar<uint8_t>(*value); break;
    case Kind::u16: number = scalar<uint16_t>(*value); break;
    case Kind::i32: number = scalar<int32_t>(*value); break;
    case Kind::u32: number = scalar<uint32_t>(*value); break;
    default:
        throw Error(path.string() + ": " + key + " is of type " + std::string(kind_name(value->kind)) +
                    "; expected uint16");
    }
    if (number < 0)
        throw Error(path.string() + ": " + key + " is " + std::to_string(number) + "; expected 0 or more");
    return static_cast<uint64_t>(number);
}

void expect(const Contents& contents, const char* key, uint64_t expected, const std::filesystem::path& path) {
    const uint64_t found = integer(contents, key, UINT64_MAX, path);
    if (found == expected) return;
    throw Error(path.string() + ": " + key + " is " +
                (found == UINT64_MAX ? std::string("missing") : std::to_string(found)) + "; expected " +
                std::to_string(expected));
}

}  // namespace

Mapping::Mapping(const std::filesystem::path& path) {
    // O_NONBLOCK: opening a named pipe must not wait for a writer.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail_system(path, "open the file");
    struct stat status{};
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(fd);
        throw Error(path.string() + ": not a regular file");
    }
    const auto size = static_cast<size_t>(status.st_size);
    void* data = size == 0 ? nullptr : mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    const int map_errno = errno;
    close(fd);
    if (data == MAP_FAILED) {
        errno = map_errno;
        fail_system(path, "map the file");
    }
    bytes_ = {static_cast<const uint8_t*>(data), size};
}

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping::~Mapping() {
    if (!bytes_.empty()) munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

Model::Model(const std::filesystem::path& path) {
    mappings_.emplace_back(path);
    first_ = parse(mappings_.back().bytes(), path.string());
    tensors_ = first_.tensors;
    const uint64_t count = integer(first_, "split.count", 0, path);
    if (count > 1) add_splits(path, count);
}

void Model::add_splits(const std::filesystem::path& first, uint64_t count) {
    const std::string name = first.string();
    if (count > kMaxSplits) {
        throw Error(name + ": split.count is " + std::to_string(count) + "; at most " +
                    std::to_string(kMaxSplits) + " are allowed");
    }
    const uint64_t index = integer(first_, "split.no", UINT64_MAX, first);
    if (index != 0) {
        const std::string which = index < count ? std::to_string(index + 1) : "an unknown one";
        throw Error(name + ": this is file " + which + " of a model split into " + std::to_string(count) +
                    "; open the first one, named ..." + split_suffix(1, count));
    }
    if (!name.ends_with(split_suffix(1, count))) {
        throw Error(name + ": first of " + std::to_string(count) +
                    " files of a split model; its name must end in " + split_suffix(1, count));
    }
    const std::string prefix = name.substr(0, name.size() - split_suffix(1, count).size());
    std::unordered_set<std::string_view> names;
    for (const Tensor& t : tensors_) names.insert(t.name);
    for (uint64_t i = 1; i < count; ++i) {
        const std::filesystem::path path = prefix + split_suffix(i + 1, count);
        mappings_.emplace_back(path);
        const Contents contents = parse(mappings_.back().bytes(), path.string());
        expect(contents, "split.no", i, path);
        expect(contents, "split.count", count, path);
        for (const Tensor& t : contents.tensors) {
            if (!names.insert(t.name).second) {
                throw Error(path.string() + ": tensor '" + std::string(t.name) +
                            "' is also in an earlier file of the split model");
            }
            tensors_.push_back(t);
        }
    }
    expect(first_, "split.tensors.count", tensors_.size(), first);
}

}  // namespace treadle::gguf
