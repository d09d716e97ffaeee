// exit_score: confidence of an exit's head in its token, if the exit's MLP, where it has one, accepts the row.
//
//   score = 1 / Σ exp(logits - logits[token]), the softmax probability of the likeliest token (CALM, Schuster et al. 2022);
//           -1, which is below every threshold, if the MLP's score is below its threshold or NaN, or the logits are not finite
//
// The blocks of a row add up parts of the sum, 16 bytes of logits at a time; the last one adds the parts, in their order.
#pragma once

#include "entry_points.cuh"
#include "exit_score_params.h"
#include "last_block.cuh"
#include "row_piece.cuh"
#include "warp_sum.cuh"

namespace tide {

// Σ exp(logits[i] - best) over the piece of elements at … at + kSize, of which those below 0 and from `vocab` on do not exist.
template <typename T>
__device__ __forceinline__ float piece_exponentials(const T* logits, int at, int vocab, float best) {
  constexpr int kSize = Piece<T>::kSize;
  float sum = 0.0f;
  if (at >= 0 && at + kSize <= vocab) {
    const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(logits + at);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += expf(to_float(piece.elements[i]) - best);
  } else {
    for (int i = max(at, 0); i < min(at + kSize, vocab); ++i) sum += expf(to_float(logits[i]) - best);
  }
  return sum;
}

// The block's part of the sum, in thread 0. Pieces begin on 16 bytes, where a row of an odd vocabulary need not.
template <typename T>
__device__ __forceinline__ float block_exponentials(const T* logits, int64_t token, int vocab) {
  __shared__ float parts[kScoreThreads / 32];
  constexpr int kSize = Piece<T>::kSize;
  const float best = to_float(logits[token]);
  const int skipped = int(reinterpret_cast<uint64_t>(logits) % 16 / sizeof(T));
  float sum = 0.0f;
  for (int at = int(blockIdx.x * kScoreThreads + threadIdx.x) * kSize - skipped; at < vocab; at += gridDim.x * kScoreThreads * kSize)
    sum += piece_exponentials(logits, at, vocab, best);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kScoreThreads / 32; ++warp) total += parts[warp];
  return total;
}

template <typename T>
__device__ __forceinline__ void exit_score(const exit_score_params& v) {
  const int row = blockIdx.y;
  if (row >= v.rows) return;
  const int64_t token = v.token[row];
  const bool scored = token >= 0 && (!v.mlp_score || v.mlp_score[row] >= v.mlp_threshold);
  float* sums = v.workspace + int64_t(row) * gridDim.x;
  if (scored) {
    const float sum = block_exponentials(static_cast<const T*>(v.logits) + int64_t(row) * v.vocab, token, v.vocab);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  }
  // Every block of the row has then read `mlp_score`, which `score` may alias.
  if (!last_block(v.counters + row, gridDim.x) || threadIdx.x >= 32) return;
  const float total = warp_sum(scored && threadIdx.x < gridDim.x ? __ldcg(sums + threadIdx.x) : 0.0f);
  if (threadIdx.x == 0) v.score[row] = scored ? 1.0f / total : -1.0f;
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_score, exit_score_params, tide::kScoreThreads)
