// Parameters and launch plan of `exit_score`.
#pragma once

#include "launch_plan.h"

namespace tide {

constexpr int32_t kScoreThreads = 256;
constexpr int32_t kScorePieces = 4;      // of 16 bytes per thread
constexpr int32_t kMaxScoreBlocks = 32;  // per row: one warp adds their sums, one per lane

struct exit_score_params {
  const void* logits;      // [rows, vocab] T, logits of the exit head
  const int64_t* token;    // [rows] argmax of the logits; negative: not finite
  const float* mlp_score;  // [rows] null: the exit has no MLP
  float* score;            // [rows] may alias `mlp_score`
  float* workspace;        // [rows, blocks per row]
  uint32_t* counters;      // [rows] zero before the first launch
  int32_t rows;
  int32_t vocab;
  float mlp_threshold;
  int32_t reserved;
};

// grid (blocks per row, rows).
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_score(int64_t rows, int32_t vocab, int32_t element_bytes) {
  const int64_t some = rows > 0 ? rows : 1;
  const int64_t blocks = clamp(divide_up(vocab, int64_t(kScoreThreads) * kScorePieces * 16 / element_bytes), 1, kMaxScoreBlocks);
  return {{uint32_t(blocks), uint32_t(some), 1}, {uint32_t(kScoreThreads), 1, 1}, 0, uint32_t(some), some * blocks * 4};
}

}  // namespace tide
