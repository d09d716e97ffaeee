// Parameters of `exit_score`, which is launched as a grid of (blocks per row, rows).
#pragma once

#include "portable.h"

namespace tide {

constexpr int32_t kScoreThreads = 256;

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

}  // namespace tide
