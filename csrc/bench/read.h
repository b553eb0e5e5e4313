// Read bandwidth of memory.
#pragma once

#include <cstddef>
#include <vector>

#include "threads/pool.h"

namespace treadle {

// Reads `bytes` of memory `passes` times with every worker of the pool and returns the seconds of each pass.
// `bytes` should be several times the last-level cache. Throws std::bad_alloc when they cannot be had.
std::vector<double> time_reads(Pool& pool, size_t bytes, int passes);

}  // namespace treadle
