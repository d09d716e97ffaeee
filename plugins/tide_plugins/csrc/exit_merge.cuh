// exit_merge: runs after the layers behind the last exit. Rows that did not exit take the full model's token, and no tokens are
// pending afterwards.
#pragma once

#include "entry_points.cuh"
#include "exit_merge_params.h"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_merge(const exit_merge_params& v) {
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    if (v.exits[row] == 0) v.chosen[row] = v.deep_token[row];
    v.waiting[(v.exit_count - 1) * v.rows + row] = 0;  // tokens of the other exits have moved on before
  }
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_merge, f32, float, exit_merge_params, tide::kLoopThreads)
