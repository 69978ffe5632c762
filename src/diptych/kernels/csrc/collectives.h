// Collectives of ranks that are processes of one host, over memory that all of them have mapped. collectives.cpp says how.
#pragma once

#include "abi.h"

namespace diptych {

// Sums `count` elements of `num_inputs` ranks in rank order, in float32; `out` may be one of the inputs.
using SumRanks = void (*)(void* out, const void* const* inputs, int64_t num_inputs, int64_t count, Dtype dtype);

// One rank's view of the segment: `handle` of the C interface.
class SharedCollectives;

// Returns as the C interface does: 0, or the failure's code and rank.
int64_t shm_allreduce(SharedCollectives& group, void* out, const void* x, int64_t count, Dtype dtype, SumRanks sum);

}  // namespace diptych
