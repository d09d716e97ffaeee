// exit_merge: the layers behind the last exit of a decode loop have run. Rows that did not leave take the model's own token, and
// nothing waits any more.
#pragma once

#include "entry_points.cuh"
#include "exit_merge_plan.h"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_merge(const exit_merge_params& v) {
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    if (v.exits[row] == 0) v.chosen[row] = v.deep_token[row];
    v.waiting[(v.exit_count - 1) * v.rows + row] = 0;  // what waited at the others has moved on
  }
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_merge, f32, float, exit_merge_params, tide::kLoopThreads)
