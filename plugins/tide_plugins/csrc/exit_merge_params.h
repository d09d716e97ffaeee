// Parameters of `exit_merge`, which is launched as one block.
#pragma once

#include "loop_threads.h"

namespace tide {

struct exit_merge_params {
  const uint8_t* exits;       // [rows] 0: the token did not exit
  const int64_t* deep_token;  // [rows]
  int64_t* chosen;            // [rows]
  int32_t* waiting;           // [exits, rows] in and out
  int32_t rows;
  int32_t exit_count;
};

}  // namespace tide
