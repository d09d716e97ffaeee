// What `exit_gate` takes and how it is launched.
#pragma once

#include "decode_loop_plan.h"

namespace tide {

struct exit_gate_params {
  const uint8_t* hidden;      // [rows, row_bytes] states at the exit
  uint8_t* window;            // [rows, width, row_bytes] states that wait in front of the deeper layers
  const float* score;         // [rows]
  const uint8_t* finished;    // [rows] 0: runs
  const int64_t* length;      // [rows]
  const int32_t* turns_left;  // scalar
  int32_t* waiting;           // [rows] in and out
  uint8_t* exits;             // [rows] 1: leaves
  uint8_t* wants;             // [rows] 1: needs the deeper layers now
  int64_t* position_ids;      // [rows, width] the deeper layers' inputs
  int32_t* position_ids32;
  int64_t* write_index;  // [rows]
  int32_t* write_index32;
  int32_t* seqlens_k;     // [rows]
  int64_t* logits_index;  // [rows]
  int32_t* logits_index32;
  int32_t* deeper;     // scalar: some row wants them
  uint32_t* counters;  // zero before the first launch
  uint64_t graph_condition;
  int64_t row_bytes;
  int64_t slots;
  int32_t rows;
  int32_t width;
  float threshold;
  int32_t sets_condition;
};

// A block a row, which copies its state.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_gate(int64_t rows) {
  return {{uint32_t(rows > 0 ? rows : 1), 1, 1}, {uint32_t(kLoopThreads), 1, 1}, 0, 1, 0};
}

}  // namespace tide
