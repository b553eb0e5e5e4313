// Read bandwidth of memory.
#pragma once

#include <cstddef>
#include <vector>

#include "threads/pool.h"

namespace treadle {

// Reads `bytes` of memory `passes` times with every worker of the pool and returns the seconds of each pass.
// `bytes` should be several times the last-level cache. Throws std::bad_alloc when they cannot be had.
std::vector<double> time_reads(Pool& pool, size_t bytes, int passes);

namespace bench_avx2 {
// Loads [data, data + bytes), `bytes` a multiple of 512, and returns a value that depends on all of it.
long sum(const char* data, size_t bytes);
}  // namespace bench_avx2

}  // namespace treadle
