// exit_candidates: which rows of a decode loop may take an exit, so that the exit's head runs only if there is one.
//
//   candidate = running, has not exited before, and score >= threshold (false for NaN) where the exit has an MLP
//   score     = candidate ? the MLP's score, or 1 without an MLP : -1, which is below every threshold;  wanted = any candidate
//
// The head multiplies by the whole vocabulary: for a small model more than the layers between two exits.
#pragma once

#include "entry_points.cuh"
#include "exit_candidates_params.h"
#include "graph_condition.cuh"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_candidates(const exit_candidates_params& v) {
  bool any = false;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    const bool runs = v.finished[row] == 0 && (v.number == 1 || v.exits[row] == 0);
    const float score = v.has_mlp ? v.score[row] : 1.0f;
    const bool candidate = runs && (!v.has_mlp || score >= v.threshold);
    v.score[row] = candidate ? score : -1.0f;
    any = any || candidate;
  }
  const int32_t wanted = __syncthreads_or(any) != 0;
  if (threadIdx.x != 0) return;
  *v.wanted = wanted;
  v.counts[v.exit_count + v.number] += wanted;
  set_graph_condition(v.sets_condition, v.graph_condition, wanted);
}

}  // namespace tide

TIDE_ENTRY_POINT(exit_candidates, f32, float, exit_candidates_params, tide::kLoopThreads)
