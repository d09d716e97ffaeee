// Parameters and launch plan of `exit_join`.
#pragma once

#include "decode_loop_plan.h"

namespace tide {

struct exit_join_params {
  const uint8_t* states;    // [rows, arriving, row_bytes] outputs of the layers before the exit
  const uint8_t* finished;  // [rows] 0: running
  const int32_t* waiting;   // [exits, rows] pending tokens at each exit
  uint8_t* window;          // [rows, width, row_bytes] pending states at this exit
  uint8_t* last;            // [rows, row_bytes] newest state of each row; null: not needed
  int64_t row_bytes;
  int32_t rows;
  int32_t arriving;
  int32_t width;
  int32_t number;  // the exit's number: 1, 2, …
};

// One block per state that may arrive.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_join(int64_t rows, int64_t arriving) {
  return {{uint32_t(rows > 0 ? rows : 1), uint32_t(arriving > 0 ? arriving : 1), 1}, {uint32_t(kLoopThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
