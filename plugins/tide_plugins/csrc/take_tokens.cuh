// take_tokens: append the token of each running row to it, and say which rows end, without the host.
//
//   emitted = running and chosen >= 0;  last_token = chosen and length += 1 where emitted
//   a row ends at an eos id (1), at its limit (2), or where it has no token (3), as after logits that are not finite
#pragma once

#include "entry_points.cuh"
#include "row_end.cuh"
#include "take_tokens_params.h"

namespace tide {

// Whether the row goes on.
__device__ __forceinline__ bool take_token(const take_tokens_params& v, int row) {
  const int64_t token = v.chosen[row];
  const bool runs = v.finished[row] == kRunning, takes = runs && token >= 0;
  if (takes) {
    v.last_token[row] = token;
    v.length[row] += 1;
    v.finished[row] = end_of_row(v.eos, v.eos_count, token, v.length[row] + 1, v.limit[row]);
  } else if (runs) {
    v.finished[row] = kNoToken;
  }
  v.emitted[row] = takes;
  return v.finished[row] == kRunning;
}

template <typename T>
__device__ __forceinline__ void take_tokens(const take_tokens_params& v) {
  __shared__ int32_t running;
  if (threadIdx.x == 0) running = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x)
    if (take_token(v, row)) atomicAdd(&running, 1);
  __syncthreads();
  if (threadIdx.x == 0) *v.running = running;
}

}  // namespace tide

TIDE_ENTRY_POINT(take_tokens, f32, float, take_tokens_params, tide::kLoopThreads)
