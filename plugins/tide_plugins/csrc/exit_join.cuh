// exit_join: append states that arrive at an exit of a decode loop to those pending there. Copies only; exit_gate counts them.
//
//   arrived = first exit ? row is running : waiting[exit - 1]    tokens pending before the layers that have just run
//   window[waiting[exit] + i] = states[i], i < arrived;  last = states[arrived - 1]
#pragma once

#include "copy_state.cuh"
#include "entry_points.cuh"
#include "exit_join_params.h"
#include "exit_waiting.cuh"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_join(const exit_join_params& v) {
  const int row = blockIdx.x, i = blockIdx.y;
  if (row >= v.rows) return;
  const int32_t arrived = arrivals(v.waiting, v.finished, v.number, v.rows, row);
  if (i >= arrived) return;
  const uint8_t* state = v.states + (int64_t(row) * v.arriving + i) * v.row_bytes;
  const int32_t place = waiting_at(v.waiting, v.number, v.rows, row) + i;
  copy_state(state, v.window + (int64_t(row) * v.width + place) * v.row_bytes, v.row_bytes);
  if (v.last && i == arrived - 1) copy_state(state, v.last + row * v.row_bytes, v.row_bytes);
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_join, f32, float, exit_join_params, tide::kLoopThreads)
