// What `exit_merge` takes and how it is launched.
#pragma once

#include "decode_loop_plan.h"

namespace tide {

struct exit_merge_params {
  const uint8_t* exits;       // [rows]
  const int64_t* exit_token;  // [rows]
  const int64_t* deep_token;  // [rows]
  const int32_t* deeper;      // scalar
  int64_t* chosen;            // [rows]
  int32_t* waiting;           // [rows] in and out
  int64_t* counts;            // [2] pinned: turns written, turns whose deeper layers ran
  int32_t rows;
  int32_t reserved;
};

}  // namespace tide
