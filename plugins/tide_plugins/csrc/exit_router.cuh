// exit_router: score N tokens, decide which exit, and list exiting and continuing rows, in one launch.
//
//   hidden [N, H] T, down [R, H] T, down_bias [R], up [R], up_bias [1] → score [N], exits [N], exit_rows, continue_rows, verdict
//
//   n     = norm(hidden)                                      RMSNorm or LayerNorm, no weight: row_norm.cuh
//   score = sigmoid(up · silu(down · n + down_bias) + up_bias)
//   exits = score >= threshold                                false for a NaN
//
// The router of tide_calibrate/routers/mlp.py (TIDE, arXiv:2603.21365, with RMSNorm before it). Accumulates in float32 in an
// order that depends on the plan alone: the same plan gives the same bits.
//
// Blocks write partial products to the workspace; the last block of a group of rows scores it; the last of these blocks
// partitions the rows. Compile: nvrtc --std=c++17 -I csrc -I $CUDA/include --gpu-architecture=sm_90
#pragma once

#include "dynamic_shared.cuh"
#include "entry_points.cuh"
#include "exit_router_plan.h"
#include "graph_condition.cuh"
#include "last_block.cuh"
#include "ordered_partition.cuh"
#include "project_group.cuh"
#include "project_tile.cuh"
#include "router_score.cuh"

namespace tide {

constexpr int kTileBatch = kSmallTileRows;  // rows of a tile scored together

template <typename T>
__device__ __forceinline__ DownProjection<T> router_projection(const exit_router_params& p) {
  const int live = p.row_count ? min(*p.row_count, p.rows) : p.rows;
  return {{static_cast<const T*>(p.hidden), p.row_stride, nullptr},
          static_cast<const T*>(p.down),
          live,
          p.hidden_size,
          p.width,
          p.chunk,
          p.down_sum != nullptr,
          p.workspace};
}

// Run by a warp: writes the row's score and exit flag.
__device__ __forceinline__ void score_row(const exit_router_params& p, int row, const RowNorm& norm, const float* products) {
  const float score = router_score({p.down_sum, p.down_bias, p.up, p.up_bias, p.width}, norm, products);
  if (threadIdx.x % 32 == 0) {
    p.score[row] = score;
    p.exits[row] = score >= p.threshold;
  }
}

// Run by the last block: writes the row lists, their lengths, and the graph condition.
__device__ __forceinline__ void list_rows(const exit_router_params& p, int live) {
  const int exits = ordered_partition(p.exits, live, p.exit_rows, p.continue_rows);
  if (threadIdx.x != 0) return;
  const int32_t verdict = exits == live ? 0 : exits > 0 ? 1 : 2;
  *p.exit_count = exits;
  *p.continue_count = live - exits;
  *p.verdict = verdict;
  set_graph_condition(p.sets_condition, p.graph_condition, verdict);
}

template <int kBatch, typename T>
__device__ __forceinline__ void score_and_list(const exit_router_params& p, const DownProjection<T>& projection,
                                               const GroupWorkspace& group) {
  if (!last_block(p.counters + blockIdx.z, gridDim.x * gridDim.y)) return;
  finish_rows<kBatch>(projection, group, p.epsilon, dynamic_shared<float>(),
                      [&](int row, const RowNorm& norm, const float* products) { score_row(p, row, norm, products); });
  if (last_block(p.counters + gridDim.z, gridDim.z)) list_rows(p, projection.live);
}

template <typename T>
__device__ __forceinline__ void exit_router(const exit_router_params& p) {
  const DownProjection<T> projection = router_projection<T>(p);
  const GroupWorkspace group(p.workspace, kGroupRows, gridDim.y * kSliceWidth);
  project_group(projection, group);
  score_and_list<kGroupRows>(p, projection, group);
}

template <typename T>
__device__ __forceinline__ void exit_router_tiled(const exit_router_params& p) {
  const DownProjection<T> projection = router_projection<T>(p);
  const GroupWorkspace tile(p.workspace, p.tile_rows, int(round_up(p.width, kWarpWidth)));
  if (p.tile_rows == kSmallTileRows)
    project_tile<kSmallTileRows, kSmallWarpWidth>(projection, tile);
  else
    project_tile<kTileRows, kWarpWidth>(projection, tile);
  score_and_list<kTileBatch>(p, projection, tile);
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_router, exit_router_params, tide::kGroupThreads)
TIDE_ENTRY_POINTS(exit_router_tiled, exit_router_params, tide::kMaxTileThreads)
