// exit_inputs: inputs of the layers behind an exit of a decode loop, for as few tokens of each row as are pending there.
//
//   tokens = 2^choice, the smallest that holds what is pending in each running row
//   states[row, i] = window[row, i], i < tokens
//   position of the first pending token, so that all pending tokens run in one launch
#pragma once

#include "copy_state.cuh"
#include "entry_points.cuh"
#include "exit_inputs_params.h"
#include "exit_waiting.cuh"
#include "graph_condition.cuh"

namespace tide {

// Called by all threads of a block.
__device__ __forceinline__ int32_t choose_tokens(const exit_inputs_params& v) {
  int32_t most = 1, choice = 0;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x)
    if (v.finished[row] == 0) most = max(most, waiting_at(v.waiting, v.number, v.rows, row));
  for (int tokens = 1; tokens < v.width; tokens *= 2) choice += __syncthreads_or(most > tokens) != 0;
  return choice;
}

// Clamped so that all tokens have slots: finished rows write to the last slots, which are not read again.
__device__ __forceinline__ void place_window(const exit_inputs_params& v, int row, int32_t tokens) {
  const int32_t some = min(max(waiting_at(v.waiting, v.number, v.rows, row), 1), tokens);
  const int64_t wanted = v.length[row] + 1 - some, most = v.slots - tokens, first = wanted < most ? wanted : most;
  const int64_t begin = int64_t(row) * tokens, chosen = begin + some - 1;
  for (int i = 0; i < tokens; ++i) {
    if (v.position_ids) v.position_ids[begin + i] = first + i;
    if (v.position_ids32) v.position_ids32[begin + i] = int32_t(first + i);
  }
  if (v.write_index) v.write_index[row] = first;
  if (v.write_index32) v.write_index32[row] = int32_t(first);
  if (v.seqlens_k) v.seqlens_k[row] = int32_t(first + tokens - 1);
  if (v.logits_index) v.logits_index[row] = chosen;
  if (v.logits_index32) v.logits_index32[row] = int32_t(chosen);
}

template <typename T>
__device__ __forceinline__ void exit_inputs(const exit_inputs_params& v) {
  const int row = blockIdx.x, i = blockIdx.y;
  const int32_t choice = choose_tokens(v), tokens = 1 << choice;
  if (row < v.rows && i < tokens)
    copy_state(v.window + (int64_t(row) * v.width + i) * v.row_bytes, v.states + (int64_t(row) * tokens + i) * v.row_bytes, v.row_bytes);
  if (threadIdx.x != 0 || i != 0) return;
  if (row < v.rows) place_window(v, row, tokens);
  if (row != 0) return;
  *v.choice = choice;
  set_graph_condition(v.sets_condition, v.graph_condition, choice);
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_inputs, f32, float, exit_inputs_params, tide::kLoopThreads)
