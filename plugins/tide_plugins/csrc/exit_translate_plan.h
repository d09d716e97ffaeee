// Parameters, shared by both, and launch plans of `exit_translate_down` and `exit_translate_up`, which run in this order on one
// stream.
#pragma once

#include "down_projection_plan.h"

namespace tide {

struct exit_translate_params {
  const void* hidden;        // T [*, hidden_size], row_stride elements apart
  const void* down;          // T [rank, hidden_size]
  const float* down_sum;     // null: RMSNorm; else LayerNorm, and [rank] the sums of down's rows
  const void* up;            // T [hidden_size, rank]
  const int32_t* row_list;   // [rows] which rows of hidden; null: 0, 1, …
  const int32_t* row_count;  // device scalar <= rows; null: rows
  const int32_t* origin;     // output row of each row of hidden; null: packed in the order of the list
  void* out;                 // T [*, hidden_size], out_stride; may alias hidden when every row keeps its index
  float* code;               // [rows, rank] down · norm(h), from the first launch to the second
  float* workspace;          // 256-byte aligned
  uint32_t* counters;        // zero before the first launch
  int64_t row_stride;
  int64_t out_stride;
  int32_t rows;  // at most
  int32_t hidden_size;
  int32_t rank;   // 1 … 128
  int32_t chunk;  // the plan's
  float epsilon;
  int32_t reserved;
};

constexpr int32_t kMaxRank = 128;
constexpr int32_t kUpThreads = 256;
constexpr int32_t kUpLanes = 8;  // share one row of `up`
constexpr int32_t kUpColumns = kUpThreads / kUpLanes;

struct TranslatePlan {
  LaunchPlan down;
  LaunchPlan up;
  int32_t chunk;
};

inline TIDE_HOST_DEVICE TranslatePlan plan_exit_translate(int64_t rows, int32_t hidden_size, int32_t rank, int32_t element_bytes,
                                                          int32_t sm_count) {
  const DownProjectionPlan down = plan_group_projection(rows, hidden_size, rank, element_bytes, sm_count);
  const LaunchPlan up = {
      {uint32_t(divide_up(hidden_size, kUpColumns)), down.launch.grid[2], 1}, {uint32_t(kUpThreads), 1, 1}, 0, 0, 0};
  return {down.launch, up, down.chunk};
}

}  // namespace tide
