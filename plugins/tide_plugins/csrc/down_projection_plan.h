// Division of hidden [rows, H] · down [width, H]^T among blocks, shared by the router and the translator.
//
//   workspace   products [groups, chunks, group_rows, pitch] float32, then moments [groups, chunks, group_rows, 2] float32
//
// A group of rows is split over chunks of H. Group form, for decoding: 8 rows per block, `down` in slices of 16, CUDA cores. Tile
// form, for prefill: 128 rows per block, or 32 while these occupy the GPU better, all of `down`, tensor cores.
#pragma once

#include "launch_plan.h"

namespace tide {

constexpr int32_t kGroupRows = 8;
constexpr int32_t kGroupThreads = 256;
constexpr int32_t kSliceWidth = 16;
constexpr int32_t kMaxChunks = 32;  // one warp adds the moments of a row, one chunk per lane

constexpr int32_t kTileRows = 128;
constexpr int32_t kSmallTileRows = 32;
constexpr int32_t kWarpRows = 32;   // rows of a tile per warp
constexpr int32_t kWarpWidth = 64;  // of a tile of 128 rows
constexpr int32_t kSmallWarpWidth = 16;
constexpr int32_t kMaxTileThreads = 512;  // width 256
constexpr int32_t kStageBytes = 64;       // per row and pipeline stage
constexpr int32_t kMaxStages = 8;
constexpr int32_t kMaxRingBytes = 60 * 1024;  // sm_75 has 64 KiB in all
constexpr int32_t kTileChunks = 8;            // with more, the final reduction takes longer than the product

struct DownProjectionPlan {
  LaunchPlan launch;
  int32_t chunk;      // elements of H per block
  int32_t tile_rows;  // rows per block of the tile form
};

TIDE_HOST_DEVICE constexpr int64_t projection_bytes(int64_t groups, int64_t chunks, int64_t group_rows, int64_t pitch) {
  return groups * chunks * group_rows * (pitch + 2) * 4;
}

// Stages of the ring: more of them hide more of the memory's latency.
TIDE_HOST_DEVICE constexpr int32_t tile_stages(int32_t tile_rows, int64_t pitch) {
  return int32_t(clamp(kMaxRingBytes / ((tile_rows + pitch) * kStageBytes), 2, kMaxStages));
}

// 32 while there are two multiprocessors for each such tile: the work is spread over more blocks, and so is the final reduction. Beyond,
// reading `down` once per 32 rows costs more.
TIDE_HOST_DEVICE constexpr int32_t tile_rows_for(int64_t rows, int32_t sm_count) {
  return 2 * divide_up(rows, kSmallTileRows) <= sm_count ? kSmallTileRows : kTileRows;
}

// Enough blocks for every multiprocessor to hold two; never more than `most` chunks, each a whole number of `step` elements.
TIDE_HOST_DEVICE constexpr int64_t chunk_of(int64_t hidden_size, int64_t step, int64_t wanted, int64_t most) {
  const int64_t steps = divide_up(hidden_size, step);
  const int64_t chunks = clamp(wanted, 1, steps < most ? steps : most);
  return divide_up(steps, chunks) * step;
}

inline TIDE_HOST_DEVICE DownProjectionPlan plan_group_projection(int64_t rows, int32_t hidden_size, int32_t width,
                                                                 int32_t element_bytes, int32_t sm_count) {
  const int64_t groups = divide_up(rows > 0 ? rows : 1, kGroupRows), slices = divide_up(width, kSliceWidth);
  const int64_t wanted = divide_up(2 * int64_t(sm_count), groups * slices);
  const int64_t chunk = chunk_of(hidden_size, 32 * 16 / element_bytes, wanted, kMaxChunks);
  const int64_t chunks = divide_up(hidden_size, chunk), pitch = slices * kSliceWidth;
  DownProjectionPlan plan{};
  plan.launch = {{uint32_t(chunks), uint32_t(slices), uint32_t(groups)},
                 {uint32_t(kGroupThreads), 1, 1},
                 uint32_t(kGroupRows * pitch * 4),
                 uint32_t(groups + 1),
                 projection_bytes(groups, chunks, kGroupRows, pitch)};
  plan.chunk = int32_t(chunk);
  return plan;
}

inline TIDE_HOST_DEVICE DownProjectionPlan plan_tile_projection(int64_t rows, int32_t hidden_size, int32_t width,
                                                                int32_t element_bytes, int32_t sm_count) {
  const int32_t tile_rows = tile_rows_for(rows, sm_count);
  const int64_t tiles = divide_up(rows > 0 ? rows : 1, tile_rows), pitch = round_up(width, kWarpWidth);
  const int64_t step = 8 * kStageBytes / element_bytes;
  const int64_t chunk = chunk_of(hidden_size, step, sm_count / tiles, kTileChunks);
  const int64_t chunks = divide_up(hidden_size, chunk);
  DownProjectionPlan plan{};
  plan.launch = {{uint32_t(chunks), 1, uint32_t(tiles)},
                 {uint32_t(pitch / kWarpWidth * (kTileRows / kWarpRows) * 32), 1, 1},
                 uint32_t(tile_stages(tile_rows, pitch) * (tile_rows + pitch) * kStageBytes),
                 uint32_t(tiles + 1),
                 projection_bytes(tiles, chunks, tile_rows, pitch)};
  plan.chunk = int32_t(chunk);
  plan.tile_rows = tile_rows;
  return plan;
}

}  // namespace tide
