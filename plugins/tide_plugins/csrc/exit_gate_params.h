// Parameters of `exit_gate`, which is launched as one block.
#pragma once

#include "loop_threads.h"

namespace tide {

struct exit_gate_params {
  const float* score;         // [rows]
  const int64_t* exit_token;  // [rows] token of the exit head
  const uint8_t* finished;    // [rows] 0: running
  const int32_t* turns_left;  // scalar
  int32_t* waiting;           // [exits, rows] in and out: pending tokens at each exit
  uint8_t* exits;             // [rows] in and out: number of the exit that the token took; 0: none so far
  int64_t* chosen;            // [rows] token of rows that exit
  int32_t* deeper;            // scalar: whether the layers after the exit run
  int64_t* counts;            // element `number`: turns that ran them
  uint64_t graph_condition;
  int32_t rows;
  int32_t width;
  int32_t exit_count;
  int32_t number;  // the exit's number: 1, 2, …
  float threshold;
  int32_t sets_condition;
};

}  // namespace tide
