// Parameters of `take_tokens`, which is launched as one block.
#pragma once

#include "loop_threads.h"

namespace tide {

struct take_tokens_params {
  const int64_t* chosen;     // [rows] token of each row; negative: it has none
  const int64_t* eos;        // [eos_count] ids that end a row, or null
  const int64_t* limit;      // [rows] most tokens of prompt and output
  int64_t* length;           // [rows] in and out: cached tokens = write index and position id of the next one
  int64_t* last_token;       // [rows] in and out: the next step's input id
  uint8_t* finished;         // [rows] in and out: 0 running, 1 eos, 2 limit, 3 no token
  int32_t* emitted;          // [rows] whether `chosen` is new output
  int32_t* running;          // scalar: rows not finished
  int32_t rows;
  int32_t eos_count;
};

}  // namespace tide
