// Parameters, with shapes, and launch plan of `exit_router`; the formula is in exit_router.cuh.
#pragma once

#include "down_projection_plan.h"

namespace tide {

struct exit_router_params {
  const void* hidden;        // T [rows, hidden_size], row_stride elements apart
  const void* down;          // T [width, hidden_size]
  const float* down_sum;     // null: RMSNorm; else LayerNorm, and [width] the sums of down's rows
  const float* down_bias;    // [width]
  const float* up;           // [width]
  const float* up_bias;      // [1]
  const int32_t* row_count;  // device scalar <= rows: the live rows; null: all
  float* score;              // [rows]
  uint8_t* exits;            // [rows] 1 iff score >= threshold
  int32_t* exit_rows;        // [rows] ascending, the first *exit_count are valid
  int32_t* continue_rows;    // [rows] ascending, the first *continue_count are valid
  int32_t* exit_count;       // scalar
  int32_t* continue_count;   // scalar
  int32_t* verdict;          // scalar: 0 no row continues, 1 some do, 2 all do
  float* workspace;          // 256-byte aligned
  uint32_t* counters;        // zero before the first launch
  uint64_t graph_condition;  // cudaGraphConditionalHandle that is set to the verdict
  int64_t row_stride;
  int32_t rows;
  int32_t hidden_size;
  int32_t width;  // 1 … 256
  int32_t chunk;  // the plan's
  float threshold;
  float epsilon;
  int32_t sets_condition;  // whether graph_condition is a handle
  int32_t tile_rows;       // the plan's
};

constexpr int32_t kMaxRouterWidth = 256;
constexpr int32_t kMostDecodeRows = 128;  // beyond that, reading `down` once per 8 rows costs more than a tile

struct RouterPlan {
  LaunchPlan launch;
  int32_t chunk;
  int32_t tile_rows;  // not 0: launch exit_router_tiled
};

inline TIDE_HOST_DEVICE RouterPlan plan_exit_router(int64_t rows, int32_t hidden_size, int32_t width, int32_t element_bytes,
                                                    int32_t sm_count) {
  const bool tiled = rows > kMostDecodeRows;
  const DownProjectionPlan plan = tiled ? plan_tile_projection(rows, hidden_size, width, element_bytes, sm_count)
                                        : plan_group_projection(rows, hidden_size, width, element_bytes, sm_count);
  return {plan.launch, plan.chunk, plan.tile_rows};
}

}  // namespace tide
