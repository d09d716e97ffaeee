// Parameters of `exit_candidates`, which is launched as one block.
#pragma once

#include "loop_threads.h"

namespace tide {

struct exit_candidates_params {
  const uint8_t* finished;  // [rows] 0: running
  const uint8_t* exits;     // [rows] number of the exit that the token took; not read at the first exit
  float* score;             // [rows] in and out
  int32_t* wanted;          // scalar: whether there is a candidate
  int64_t* counts;          // element exit_count + number: turns that ran this exit's head
  uint64_t graph_condition;
  int32_t rows;
  int32_t exit_count;
  int32_t number;  // the exit's number: 1, 2, …
  float threshold;
  int32_t has_mlp;
  int32_t sets_condition;
};

}  // namespace tide
