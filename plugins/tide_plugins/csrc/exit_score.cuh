// exit_score: how sure an exit's head is of its token, where the exit's MLP, if it has one, has let the row through.
//
//   score = 1 / Σ exp(logits - logits[token]), the softmax probability of the likeliest token (CALM, Schuster et al. 2022);
//           -1, which clears no threshold, where the MLP says less than its threshold or NaN, or the logits are no numbers
#pragma once

#include "entry_points.cuh"
#include "exit_score_plan.h"
#include "warp_sum.cuh"

namespace tide {

// By the whole block, in an order that never changes; every thread gets it.
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
  __syncthreads();  // every thread has read `mlp_score`, whose place `score` may be
  if (threadIdx.x == 0) v.score[row] = score;
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_score, exit_score_params, tide::kScoreThreads)
