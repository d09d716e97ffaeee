// What `exit_score` takes and how it is launched.
#pragma once

#include "launch_plan.h"

namespace tide {

constexpr int32_t kScoreThreads = 1024;

struct exit_score_params {
  const void* logits;      // [rows, vocab] T, the exit head's
  const int64_t* token;    // [rows] their argmax; negative: they are no numbers
  const float* mlp_score;  // [rows] null: no MLP was asked
  float* score;            // [rows] may be `mlp_score`
  int32_t rows;
  int32_t vocab;
  float mlp_threshold;
  int32_t reserved;
};

// A block a row.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_score(int64_t rows) {
  return {{uint32_t(rows > 0 ? rows : 1), 1, 1}, {uint32_t(kScoreThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
