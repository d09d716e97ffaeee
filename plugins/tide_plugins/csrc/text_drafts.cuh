// text_drafts: how the text of each row may go on, copied from where its longest end went on before, and how many of these drafts
// the next pass verifies. Prompt lookup (Saxena 2023), with the longest match, and of equally long ones the latest.
//
//   match(e) = most k ≤ 32 with text[e - k, e) = text[n - k, n), e < n;  the place: largest match(e), then largest e
//   guess[i] = text[e + i % (n - e)]: where the place runs into the present, the text repeats with that period
//   rate of draft i = (hits + prior) / (tries + weight) of the class of match + i;  expected(S) = 1 + sum over i < S - 1 of the
//   product of the rates up to i;  tokens = the S with the most expected tokens of all rows per time of a pass
//
// Each block finds the guess of a row, the last one decides for all.
#pragma once

#include "draft_class.cuh"
#include "entry_points.cuh"
#include "graph_condition.cuh"
#include "last_block.cuh"
#include "text_drafts_params.h"
#include "warp_sum.cuh"

namespace tide {

struct alignas(16) Tokens4 {
  int32_t ids[4];
};

// Tokens before `end` that equal those at the end of the text, up to 32; the last ones are known to.
__device__ __forceinline__ int32_t match_length(const int32_t* text, int32_t size, int32_t end) {
  int32_t length = 1;
  while (length < kMaxMatch && length < end && text[end - 1 - length] == text[size - 1 - length]) ++length;
  return length;
}

// The largest value of all threads, in every thread.
__device__ __forceinline__ int32_t block_max(int32_t value) {
  __shared__ int32_t of_warps[kTextThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, offset));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < kTextThreads / 32; ++warp) value = max(value, of_warps[warp]);
  return value;
}

// The place as match · 2^25 + e; 0: no end of the text occurred before.
__device__ __forceinline__ int32_t best_place(const int32_t* text, int32_t size) {
  const int32_t last = text[size - 1];
  int32_t best = 0;
  for (int32_t first = 4 * threadIdx.x; first < size - 1; first += 4 * blockDim.x) {
    const Tokens4 tokens = *reinterpret_cast<const Tokens4*>(text + first);
    for (int i = 0; i < 4; ++i) {
      const int32_t end = first + i + 1;
      if (tokens.ids[i] == last && end < size) best = max(best, match_length(text, size, end) << 25 | end);
    }
  }
  return block_max(best);
}

// Drafts of a row after a match of so many tokens.
__device__ __forceinline__ int32_t drafts_of_row(const text_drafts_params& v, int row, int32_t matched) {
  if (matched == 0) return 0;
  const int32_t most = min(v.draft_limit, kMaxDrafts);
  const int64_t left = v.limit[row] - v.length[row] - 2;  // the last token is the model's own
  return left >= most ? most : left > 0 ? int32_t(left) : 0;
}

// The row's guess, and what passes of each size promise.
__device__ __forceinline__ void guess_row(const text_drafts_params& v, int row, int32_t place) {
  __shared__ float rates[kMaxDrafts];
  const int32_t matched = place >> 25, end = place & ((1 << 25) - 1), most = drafts_of_row(v, row, matched), i = threadIdx.x;
  if (i < most) {
    v.guess[row * kMaxDrafts + i] = v.text[row * v.room + end + i % (int32_t(v.length[row]) + 1 - end)];
    const int found = draft_class(v.least, v.classes, matched + i), at = row * v.classes + found;
    rates[i] = (float(v.hits[at]) + v.prior[found]) / (float(v.tries[at]) + v.weight);
  }
  __syncthreads();
  if (i != 0) return;
  v.matched[row] = matched, v.guessed[row] = most;
  float chance = 1.0f, expected = v.finished[row] == 0 ? 1.0f : 0.0f;
  for (int power = 0, draft = 0; power < v.sizes; ++power) {
    for (; draft < (1 << power) - 1 && draft < most; ++draft) expected += chance *= rates[draft];
    v.expected[row * v.sizes + power] = expected;
  }
}

// Called by all threads of the last block.
__device__ __forceinline__ int32_t choose_size(const text_drafts_params& v) {
  __shared__ float rates[32];  // expected tokens over price
  const int own = threadIdx.x;
  if (own < v.sizes) {
    float total = 0.0f;
    for (int row = 0; row < v.rows; ++row) total += __ldcg(v.expected + row * v.sizes + own);
    rates[own] = total / v.prices[own];
  }
  __syncthreads();
  int32_t choice = 0;
  for (int power = 1; power < v.sizes; ++power)
    if (rates[power] > rates[choice]) choice = power;
  return choice;
}

// Clamped so that all tokens have slots: finished rows write to the last slots, which are not read again.
__device__ __forceinline__ void place_token(const text_drafts_params& v, int row, int i, int32_t tokens) {
  const int64_t most = v.slots - tokens, first = v.length[row] < most ? v.length[row] : most, at = int64_t(row) * tokens + i;
  const bool drafted = i > 0 && i <= __ldcg(v.guessed + row);
  if (v.input_ids) v.input_ids[at] = drafted ? __ldcg(v.guess + row * kMaxDrafts + i - 1) : v.text[row * v.room + v.length[row]];
  if (v.position_ids) v.position_ids[at] = first + i;
  if (v.position_ids32) v.position_ids32[at] = int32_t(first + i);
  if (i != 0) return;
  if (v.write_index) v.write_index[row] = first;
  if (v.write_index32) v.write_index32[row] = int32_t(first);
  if (v.seqlens_k) v.seqlens_k[row] = int32_t(first + tokens - 1);
}

template <typename T>
__device__ __forceinline__ void text_drafts(const text_drafts_params& v) {
  const int own = blockIdx.x;
  guess_row(v, own, v.finished[own] == 0 ? best_place(v.text + own * v.room, int32_t(v.length[own]) + 1) : 0);
  if (!last_block(v.counters, gridDim.x)) return;
  const int32_t choice = choose_size(v), tokens = 1 << choice;
  for (int at = threadIdx.x; at < v.rows * tokens; at += blockDim.x) place_token(v, at >> choice, at & (tokens - 1), tokens);
  if (threadIdx.x != 0) return;
  *v.choice = choice;
  set_graph_condition(v.sets_condition, v.graph_condition, choice);
}

}  // namespace tide

TIDE_ENTRY_POINT(text_drafts, f32, float, text_drafts_params, tide::kTextThreads)
