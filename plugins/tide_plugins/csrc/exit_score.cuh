// exit_score: confidence of an exit's head in its token, if the exit's MLP, where it has one, accepts the row.
//
//   score = 1 / Σ exp(logits - logits[token]), the softmax probability of the likeliest token (CALM, Schuster et al. 2022);
//           -1, which is below every threshold, if the MLP's score is below its threshold or NaN, or the logits are not finite
#pragma once

#include "entry_points.cuh"
#include "exit_score_plan.h"
#include "warp_sum.cuh"

namespace tide {

// Block-wide sum in a fixed order; every thread gets the result.
template <typename T>
__device__ __forceinline__ float probability(const T* logits, int64_t token, int32_t vocab) {
  __shared__ float parts[kScoreThreads / 32];
  const float best = to_float(logits[token]);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += expf(to_float(logits[i]) - best);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kScoreThreads / 32; ++warp) total += parts[warp];
  return 1.0f / total;
}

template <typename T>
__device__ __forceinline__ void exit_score(const exit_score_params& v) {
  const int row = blockIdx.x;
  if (row >= v.rows) return;
  const bool let_through = !v.mlp_score || v.mlp_score[row] >= v.mlp_threshold;
  const int64_t token = v.token[row];
  float score = -1.0f;
  if (let_through && token >= 0) score = probability(static_cast<const T*>(v.logits) + int64_t(row) * v.vocab, token, v.vocab);
  __syncthreads();  // every thread has read `mlp_score`, which `score` may alias
  if (threadIdx.x == 0) v.score[row] = score;
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_score, exit_score_params, tide::kScoreThreads)
