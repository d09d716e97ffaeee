// Parameters and launch plan of `exit_select`.
#pragma once

#include "launch_plan.h"

namespace tide {

struct exit_select_params {
  const void* hidden;             // T [rows, hidden_size], hidden_stride elements apart
  const void* exit_states;        // T [rows, hidden_size], exit_stride: the head's input of exited rows
  const int32_t* exit_rows;       // [rows], as exit_router wrote them
  const int32_t* continue_rows;   // [rows]
  const int32_t* exit_count;      // scalar
  const int32_t* continue_count;  // scalar
  const int32_t* origin;          // [rows] index of each row in head_input; null: exited rows are packed
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
constexpr int32_t kMostSelectBlocks = 1024;  // along rows; with more rows, a block processes several

// In place, one block processes its columns of all rows in ascending order; otherwise rows are distributed over blocks.
inline TIDE_HOST_DEVICE LaunchPlan plan_exit_select(int64_t rows, int32_t hidden_size, int32_t element_bytes, bool in_place) {
  const int64_t columns = divide_up(hidden_size, int64_t(kSelectThreads) * 16 / element_bytes);
  const int64_t blocks = in_place ? 1 : clamp(rows, 1, kMostSelectBlocks);
  return {{uint32_t(blocks), uint32_t(columns), 1}, {uint32_t(kSelectThreads), 1, 1}, 0, 0, 0};
}

}  // namespace tide
