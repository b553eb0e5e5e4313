// Runs the fuzzing harness without libFuzzer, for a build with -fsanitize=address,undefined in the tests.
//
//   fuzz_main FILE...
//
// Opens each file as a model and prints "ok" or the error; then feeds the harness with the file cut at every
// length and with seeded mutations of its header. Both stop at the first 4 KiB, where the counts, lengths and
// types are. A finding of the sanitizers ends the program.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "gguf/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using treadle::gguf::Bytes;

constexpr size_t kHeader = 4096;
constexpr int kMutations = 500;

// In a heap block of exactly its size, so that a read past the end is seen.
void feed(Bytes bytes) {
    const std::unique_ptr<uint8_t[]> copy(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), copy.get());
    LLVMFuzzerTestOneInput(copy.get(), bytes.size());
}

void mutate(Bytes bytes) {
    std::mt19937 random(1);
    constexpr uint8_t kEdges[] = {0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF};
    for (int i = 0; i < kMutations && !bytes.empty(); ++i) {
        std::vector<uint8_t> copy(bytes.begin(), bytes.end());
        const size_t at = random() % copy.size();
        const size_t end = std::min(copy.size(), at + 1 + random() % 8);
        const bool random_bytes = random() % 2;
        const uint8_t edge = kEdges[random() % std::size(kEdges)];
        for (size_t k = at; k < end; ++k) copy[k] = random_bytes ? static_cast<uint8_t>(random()) : edge;
        feed(copy);
    }
}

}  // namespace

int main(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        try {
            const treadle::gguf::Model model{argv[i]};
            std::printf("%s: ok\n", argv[i]);
        } catch (const treadle::gguf::Error& error) {
            std::printf("%s\n", error.what());
        }
        try {
            const treadle::gguf::Mapping mapping{argv[i]};
            const Bytes all = mapping.bytes();
            const Bytes header = all.first(std::min(all.size(), kHeader));
            for (size_t length = 0; length < header.size(); ++length) feed(all.first(length));
            if (!all.empty()) feed(all.first(all.size() - 1));
            mutate(header);
        } catch (const treadle::gguf::Error&) {  // printed above
        }
    }
    return 0;
}
