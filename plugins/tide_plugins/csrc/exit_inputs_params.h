// Parameters of `exit_inputs`, which is launched as one block for each state that may be pending.
#pragma once

#include "loop_threads.h"

namespace tide {

struct exit_inputs_params {
  const uint8_t* window;    // [rows, width, row_bytes] pending states at this exit
  const uint8_t* finished;  // [rows] 0: running
  const int64_t* length;    // [rows]
  const int32_t* waiting;   // [exits, rows] pending tokens at each exit
  uint8_t* states;          // room for [rows, width, row_bytes]; written: [rows, tokens, row_bytes], input of the layers
  int64_t* position_ids;    // room for [rows, width]; written: [rows, tokens]
  int32_t* position_ids32;
  int64_t* write_index;  // [rows]
  int32_t* write_index32;
  int32_t* seqlens_k;     // [rows]
  int64_t* logits_index;  // [rows]
  int32_t* logits_index32;
  int32_t* choice;  // scalar: the power of two that is `tokens`
  uint64_t graph_condition;
  int64_t slots;
  int64_t row_bytes;
  int32_t rows;
  int32_t width;  // a power of two
  int32_t number;  // the exit's number: 1, 2, …
  int32_t sets_condition;
};

}  // namespace tide
