// exit_merge: the token of each row of a decode loop, the exit's where the row left, else the model's own. Where the deeper
// layers ran, nothing waits for them any more.
#pragma once

#include "entry_points.cuh"
#include "exit_merge_plan.h"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_merge(const exit_merge_params& v) {
  const int32_t deeper = *v.deeper;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    v.chosen[row] = v.exits[row] ? v.exit_token[row] : v.deep_token[row];
    if (deeper) v.waiting[row] = 0;
  }
  if (threadIdx.x == 0 && deeper) v.counts[1] += 1;
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_merge, f32, float, exit_merge_params, tide::kLoopThreads)
