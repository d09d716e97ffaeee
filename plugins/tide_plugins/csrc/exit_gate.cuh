// exit_gate: which rows of a decode loop leave at an exit, and what the deeper layers read if any row needs them.
//
//   a row that runs:  window[waiting] = hidden;  waiting += 1;  exits = score >= threshold (a NaN does not leave)
//   wants = it does not leave, or its window is full, or this is the loop's last turn;  deeper = any row wants
//   the deeper layers' inputs: the first waiting token's place, so that all that waits is run at once
#pragma once

#include "entry_points.cuh"
#include "exit_gate_plan.h"
#include "graph_condition.cuh"
#include "last_block.cuh"

namespace tide {

// The last slots where `width` of them fit: a row that has ended writes there, nobody reads it again.
__device__ __forceinline__ int64_t first_waiting(const exit_gate_params& v, int row, int32_t waiting) {
  const int64_t first = v.length[row] + 1 - (waiting > 0 ? waiting : 1), most = v.slots - v.width;
  return first < most ? first : most;
}

__device__ __forceinline__ void place_window(const exit_gate_params& v, int row, int32_t waiting) {
  const int64_t first = first_waiting(v, row, waiting), chosen = int64_t(row) * v.width + (waiting > 0 ? waiting : 1) - 1;
  for (int i = threadIdx.x; i < v.width; i += blockDim.x) {
    if (v.position_ids) v.position_ids[int64_t(row) * v.width + i] = first + i;
    if (v.position_ids32) v.position_ids32[int64_t(row) * v.width + i] = int32_t(first + i);
  }
  if (threadIdx.x != 0) return;
  if (v.write_index) v.write_index[row] = first;
  if (v.write_index32) v.write_index32[row] = int32_t(first);
  if (v.seqlens_k) v.seqlens_k[row] = int32_t(first + v.width - 1);
  if (v.logits_index) v.logits_index[row] = chosen;
  if (v.logits_index32) v.logits_index32[row] = int32_t(chosen);
}

__device__ __forceinline__ void gate_row(const exit_gate_params& v, int row) {
  const bool runs = v.finished[row] == 0;
  const int32_t before = v.waiting[row], waiting = before + (runs ? 1 : 0);
  if (runs) {
    uint8_t* target = v.window + (int64_t(row) * v.width + before) * v.row_bytes;
    for (int64_t i = threadIdx.x; i < v.row_bytes; i += blockDim.x) target[i] = v.hidden[row * v.row_bytes + i];
  }
  place_window(v, row, waiting);
  __syncthreads();  // every thread has read `waiting`
  if (threadIdx.x != 0) return;
  const bool leaves = runs && v.score[row] >= v.threshold;
  v.waiting[row] = waiting;
  v.exits[row] = leaves;
  v.wants[row] = runs && (!leaves || waiting == v.width || *v.turns_left == 1);
}

template <typename T>
__device__ __forceinline__ void exit_gate(const exit_gate_params& v) {
  if (int(blockIdx.x) < v.rows) gate_row(v, blockIdx.x);
  if (!last_block(v.counters, gridDim.x) || threadIdx.x != 0) return;
  int32_t deeper = 0;
  for (int row = 0; row < v.rows; ++row) deeper |= __ldcg(v.wants + row);
  *v.deeper = deeper;
  set_graph_condition(v.sets_condition, v.graph_condition, deeper);
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_gate, f32, float, exit_gate_params, tide::kLoopThreads)
