// libFuzzer harness of the GGUF parser: parses the input and reads every byte that the result points to.
//
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc csrc/gguf/fuzz_gguf.cpp
//   csrc/gguf/gguf.cpp
//   ./a.out -max_total_time=300 -max_len=4096 -rss_limit_mb=512 CORPUS
#include <cstdlib>
#include <numeric>

#include "gguf/gguf.h"

using namespace treadle::gguf;

namespace {

uint64_t sum(Bytes bytes) { return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}); }

uint64_t read_everything(const Contents& contents) {
    uint64_t total = 0;
    for (const Entry& entry : contents.metadata) {
        total += entry.key.size() + sum(entry.value.bytes);
        if (entry.value.element != Kind::string) continue;
        Bytes rest = entry.value.bytes;
        for (uint64_t i = 0; i < entry.value.count; ++i) total += valid_utf8(next_string(rest));
        if (!rest.empty()) std::abort();  // the strings must fill the value exactly
    }
    for (const Tensor& tensor : contents.tensors) total += sum(tensor.data);
    return total;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        volatile uint64_t total = read_everything(parse({data, size}, "input"));
        (void)total;
    } catch (const Error&) {
    }
    return 0;
}
