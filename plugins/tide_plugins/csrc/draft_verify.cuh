// draft_verify: verify drafts against the model's verification pass, and write the start of the next step, without the host.
//
//   drafts [B, D] · deep_tokens [B, D + 1] or probabilities p [B, D + 1, V] (and proposals q [B, D, V])
//   → accepted, emitted, tokens, next last_token, length, finished; running rows
//
//   greedy     draft i is accepted iff it is deep_tokens[i]; the token after the accepted ones is deep_tokens[accepted]
//   sampling   draft i is accepted iff u · q(draft) < p(draft); the first rejected one is resampled from max(0, p - q), and after D
//              accepted drafts one is sampled from p: speculative sampling (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).
//              Without q, drafts are deterministic: q is 1 at the draft.
//
// Random numbers are keyed by token position (philox.cuh). The runtime's own verification of sampled drafts has another rule, see
// `verify` in tide_runtime/depth/exact.py. A row ends at an eos id or its limit; later tokens are dropped. A NaN is never accepted,
// and a row with an invalid distribution ends with code 3.
#pragma once

#include "draft_verify_plan.h"
#include "draw_token.cuh"
#include "entry_points.cuh"
#include "graph_condition.cuh"
#include "last_block.cuh"
#include "philox.cuh"
#include "warp_sum.cuh"

namespace tide {

constexpr uint32_t kAcceptPurpose = 0, kDrawPurpose = 1;
constexpr uint8_t kRunning = 0, kEos = 1, kLimit = 2, kNoDistribution = 3;

// Distributions p and q of row b at one draft, and the draft itself.
template <typename T>
struct DraftPlace {
  const T* p;
  const T* q;  // null: deterministic drafts
  int64_t draft;

  __device__ DraftPlace(const draft_verify_params& v, int row, int place) {
    p = static_cast<const T*>(v.probabilities) + (int64_t(row) * (v.width + 1) + place) * v.vocab;
    q = v.proposals ? static_cast<const T*>(v.proposals) + (int64_t(row) * v.width + place) * v.vocab : nullptr;
    draft = place < v.draft_count[row] ? v.drafts[int64_t(row) * v.width + place] : -1;
  }
  __device__ bool accepts(float u) const { return u * (q ? to_float(q[draft]) : 1.0f) < to_float(p[draft]); }
  // Weights to sample from after a rejection, or after the last draft (draft -1).
  __device__ float weight(int token) const {
    const float wanted = to_float(p[token]);
    if (draft < 0) return wanted;
    if (!q) return token == draft ? 0.0f : wanted;
    const float rest = wanted - to_float(q[token]);
    return rest < 0.0f ? 0.0f : rest;  // keeps NaN
  }
};

template <typename T>
__device__ __forceinline__ bool accepts_draft(const draft_verify_params& v, int row, int place) {
  if (!v.probabilities) return v.drafts[int64_t(row) * v.width + place] == v.deep_tokens[int64_t(row) * (v.width + 1) + place];
  return DraftPlace<T>(v, row, place).accepts(uniform_at(v.seed[row], v.length[row] + 1 + place, kAcceptPurpose));
}

// Computed by every warp: the number of drafts before the first rejected one.
template <typename T>
__device__ __forceinline__ int count_accepted(const draft_verify_params& v, int row) {
  const int drafts = v.draft_count[row], lane = threadIdx.x % 32;
  for (int first = 0; first < drafts; first += 32) {
    const int place = first + lane;
    const unsigned refused = __ballot_sync(kAllLanes, place < drafts && !accepts_draft<T>(v, row, place));
    if (refused) return first + __ffs(int(refused)) - 1;
  }
  return drafts;
}

// Computed by the block: the model's token after the accepted drafts; -1 if its distribution is invalid.
template <typename T>
__device__ __forceinline__ int64_t own_token(const draft_verify_params& v, int row, int accepted) {
  if (!v.probabilities) return v.deep_tokens[int64_t(row) * (v.width + 1) + accepted];
  const DraftPlace<T> place(v, row, accepted);
  const float u = uniform_at(v.seed[row], v.length[row] + 1 + accepted, kDrawPurpose);
  return draw_index([&](int token) { return place.weight(token); }, v.vocab, u);
}

__device__ __forceinline__ bool ends_row(const draft_verify_params& v, int64_t token) {
  for (int i = 0; i < v.eos_count; ++i)
    if (v.eos[i] == token) return true;
  return false;
}

// Run by one thread: writes output tokens until the row ends, and its new state. accepted < 0: the row was finished before.
__device__ __forceinline__ void emit_tokens(const draft_verify_params& v, int row, int accepted, int64_t own) {
  int64_t* tokens = v.tokens + int64_t(row) * (v.width + 1);
  int emitted = 0;
  uint8_t finished = accepted < 0 ? v.finished[row] : kRunning;
  while (emitted <= accepted && finished == kRunning) {
    const int64_t token = emitted < accepted ? v.drafts[int64_t(row) * v.width + emitted] : own;
    if (token < 0) {
      finished = kNoDistribution;
      break;
    }
    tokens[emitted++] = token;
    if (ends_row(v, token))
      finished = kEos;
    else if (v.length[row] + 1 + emitted >= v.limit[row])
      finished = kLimit;
  }
  for (int i = emitted; i <= v.width; ++i) tokens[i] = -1;
  if (emitted > 0) v.last_token[row] = tokens[emitted - 1];
  v.length[row] += emitted;
  v.finished[row] = finished;
  v.accepted[row] = max(accepted, 0);
  v.emitted[row] = emitted;
}

template <typename T>
__device__ __forceinline__ void verify_row(const draft_verify_params& v, int row) {
  if (v.finished[row]) {
    if (threadIdx.x == 0) emit_tokens(v, row, -1, -1);
    return;
  }
  const int accepted = count_accepted<T>(v, row);
  const int64_t own = own_token<T>(v, row, accepted);
  __syncthreads();  // every thread has read the row's state
  if (threadIdx.x == 0) emit_tokens(v, row, accepted, own);
}

// Run by the first warp of the last block.
__device__ __forceinline__ void count_running(const draft_verify_params& v) {
  float running = 0.0f;  // whole numbers below 2^24 are exact
  for (int row = threadIdx.x; row < v.rows; row += 32) running += __ldcg(v.finished + row) == kRunning ? 1.0f : 0.0f;
  running = warp_sum(running);
  if (threadIdx.x != 0) return;
  *v.running = int32_t(running);
  set_graph_condition(v.sets_condition, v.graph_condition, int32_t(running));
}

template <typename T>
__device__ __forceinline__ void draft_verify(const draft_verify_params& v) {
  if (int(blockIdx.x) < v.rows) verify_row<T>(v, blockIdx.x);
  if (last_block(v.counters, gridDim.x) && threadIdx.x < 32) count_running(v);
}

}  // namespace tide

TIDE_ENTRY_POINTS(draft_verify, draft_verify_params, tide::kMostVerifyThreads)
