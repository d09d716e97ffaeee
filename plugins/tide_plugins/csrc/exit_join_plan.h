// What `exit_join` takes and how it is launched.
#pragma once

#include "decode_loop_plan.h"

namespace tide {

struct exit_join_params {
  const uint8_t* states;    // [rows, arriving, row_bytes] outputs of the layers in front of the exit
  const uint8_t* finished;  // [rows] 0: runs
  const int32_t* waiting;   // [exits, rows] tokens that wait at each exit
  uint8_t* window;          // [rows, width, row_bytes] states that wait at this one
  uint8_t* last;            // [rows, row_bytes] the newest of each row; null: it is not wanted
  int64_t row_bytes;
  int32_t rows;
  int32_t arriving;
  int32_t width;
  int32_t number;  // of the exit: 1, 2, …
};

// A block for each state that may arrive.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_join(int64_t rows, int64_t arriving) {
  return {{uint32_t(rows > 0 ? rows : 1), uint32_t(arriving > 0 ? arriving : 1), 1}, {uint32_t(kLoopThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
