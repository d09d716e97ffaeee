// exit_gate: decide which rows of a decode loop exit, and whether any row needs the layers after the exit.
//
//   waiting[exit] += arriving tokens (see exit_join)
//   running row that has not exited before:  leaves = score >= threshold (false for NaN)
//   wants = not exited, or the host has to choose the exit's token (-1), or the window is full, or last turn of the loop
//   deeper = any row wants
//
// At most `width` tokens of a row are pending over all exits, so tokens that move on always fit into the next window.
#pragma once

#include "entry_points.cuh"
#include "exit_gate_params.h"
#include "exit_waiting.cuh"
#include "graph_condition.cuh"

namespace tide {

__device__ __forceinline__ void count_arrivals(const exit_gate_params& v, int row) {
  const int32_t arrived = arrivals(v.waiting, v.finished, v.number, v.rows, row);
  if (v.number > 1) v.waiting[(v.number - 2) * v.rows + row] = 0;
  v.waiting[(v.number - 1) * v.rows + row] += arrived;
}

// Takes the exit's token if its score reaches the threshold.
__device__ __forceinline__ void try_exit(const exit_gate_params& v, int row, bool runs) {
  if (v.number == 1) v.exits[row] = 0;
  if (!runs || v.exits[row] != 0 || !(v.score[row] >= v.threshold)) return;
  v.exits[row] = uint8_t(v.number);
  v.chosen[row] = v.exit_token[row];
}

__device__ __forceinline__ bool wants_deeper(const exit_gate_params& v, int row) {
  int32_t everywhere = 0;
  for (int number = v.number; number <= v.exit_count; ++number) everywhere += waiting_at(v.waiting, number, v.rows, row);
  return v.exits[row] == 0 || v.chosen[row] < 0 || everywhere == v.width || *v.turns_left == 1;
}

template <typename T>
__device__ __forceinline__ void exit_gate(const exit_gate_params& v) {
  bool wants = false;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    const bool runs = v.finished[row] == 0;
    count_arrivals(v, row);
    try_exit(v, row, runs);
    wants = (runs && wants_deeper(v, row)) || wants;
  }
  const int32_t deeper = __syncthreads_or(wants) != 0;
  if (threadIdx.x != 0) return;
  *v.deeper = deeper;
  v.counts[v.number] += deeper;
  set_graph_condition(v.sets_condition, v.graph_condition, deeper);
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_gate, f32, float, exit_gate_params, tide::kLoopThreads)
