// Parameters and launch plan of `exit_score`.
#pragma once

#include "launch_plan.h"

namespace tide {

constexpr int32_t kScoreThreads = 1024;

struct exit_score_params {
  const void* logits;      // [rows, vocab] T, logits of the exit head
  const int64_t* token;    // [rows] argmax of the logits; negative: not finite
  const float* mlp_score;  // [rows] null: the exit has no MLP
  float* score;            // [rows] may alias `mlp_score`
  int32_t rows;
  int32_t vocab;
  float mlp_threshold;
  int32_t reserved;
};

// One block per row.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_score(int64_t rows) {
  return {{uint32_t(rows > 0 ? rows : 1), 1, 1}, {uint32_t(kScoreThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
