// What `exit_select` takes and how it is launched.
#pragma once

#include "launch_plan.h"

namespace tide {

struct exit_select_params {
  const void* hidden;             // T [rows, hidden_size], hidden_stride elements apart
  const void* exit_states;        // T [rows, hidden_size], exit_stride: what an exited row hands to the head
  const int32_t* exit_rows;       // [rows], as exit_router wrote them
  const int32_t* continue_rows;   // [rows]
  const int32_t* exit_count;      // scalar
  const int32_t* continue_count;  // scalar
  const int32_t* origin;          // [rows] a row's place in head_input; null: exited rows are packed
  void* continue_hidden;          // T [*continue_count, hidden_size], continue_stride; null: not wanted; hidden itself: in place
  int32_t* continue_origin;       // [*continue_count] or null; not origin itself
  void* head_input;               // T, head_stride; null: not wanted; overlaps neither hidden nor continue_hidden
  int64_t hidden_stride;
  int64_t exit_stride;
  int64_t continue_stride;
  int64_t head_stride;
  int32_t rows;
  int32_t hidden_size;
};

constexpr int32_t kSelectThreads = 256;
constexpr int32_t kMostSelectBlocks = 1024;  // of rows; a block takes several beyond that

// In place, one block owns its columns of every row and walks the rows upward; otherwise rows are spread over blocks.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_select(int64_t rows, int32_t hidden_size, int32_t element_bytes, bool in_place) {
  const int64_t columns = divide_up(hidden_size, int64_t(kSelectThreads) * 16 / element_bytes);
  const int64_t blocks = in_place ? 1 : clamp(rows, 1, kMostSelectBlocks);
  return {{uint32_t(blocks), uint32_t(columns), 1}, {uint32_t(kSelectThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
