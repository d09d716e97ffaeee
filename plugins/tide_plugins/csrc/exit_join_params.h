// Parameters of `exit_join`, which is launched as one block for each state that may arrive.
#pragma once

#include "loop_threads.h"

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

}  // namespace tide
