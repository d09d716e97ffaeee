// loop_turn: end of a decode loop's turn. Writes tokens to the host's ring and positions to the next turn's inputs; the loop
// continues while a row is running and turns are left.
//
//   ring[turn % ring_turns] = emitted ? last_token + 2^32 · exits : -1;  counts[0] = turn + 1
//   input_ids = last_token;  position_ids = write_index = seqlens_k = min(length, slots - 1)
//   turns_left -= 1;  proceed = running > 0 and turns_left > 0
#pragma once

#include "entry_points.cuh"
#include "graph_condition.cuh"
#include "loop_turn_params.h"

namespace tide {

constexpr int64_t kExitUnit = int64_t(1) << 32;

__device__ __forceinline__ void place_row(const loop_turn_params& v, int row, int64_t place) {
  if (v.input_ids) v.input_ids[row] = v.last_token[row];
  if (v.position_ids) v.position_ids[row] = place;
  if (v.position_ids32) v.position_ids32[row] = int32_t(place);
  if (v.write_index) v.write_index[row] = place;
  if (v.write_index32) v.write_index32[row] = int32_t(place);
  if (v.seqlens_k) v.seqlens_k[row] = int32_t(place);
}

template <typename T>
__device__ __forceinline__ void loop_turn(const loop_turn_params& v) {
  const int64_t turn = v.counts[0];
  int64_t* entry = v.ring + (turn % v.ring_turns) * v.rows;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    entry[row] = v.emitted[row] > 0 ? v.last_token[row] + v.exits[row] * kExitUnit : -1;
    place_row(v, row, v.length[row] < v.slots ? v.length[row] : v.slots - 1);
  }
  __threadfence_system();  // the host reads the entry when it sees the count
  __syncthreads();
  if (threadIdx.x != 0) return;
  v.counts[0] = turn + 1;
  const int32_t left = *v.turns_left - 1, proceed = *v.running > 0 && left > 0;
  *v.turns_left = left, *v.proceed = proceed;
  set_graph_condition(v.sets_condition, v.graph_condition, proceed);
}

}  // namespace tide

TIDE_ENTRY_POINT(loop_turn, f32, float, loop_turn_params, tide::kLoopThreads)
