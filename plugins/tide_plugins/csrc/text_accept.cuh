// text_accept: end of an exact loop's turn. Appends the drafts that the model chooses too, and one token of its own, to each row.
//
//   verified = min(guessed, tokens - 1) drafts;  the row gets chosen[0 … i], i the first with chosen[i] != guess[i], or verified
//   it ends at an eos id (1), at its limit (2), or where the model has no token (3)
//   ring[turn % ring_turns] = verified, the tokens, then -1;  counts[0] = turn + 1
//   hits and tries of a class count its guesses up to the first wrong one, verified or not, and are halved at 32 tries
//   turns_left -= 1;  proceed = a row is running, each running one has 16 slots below its bound, none lacks a token, turns are left
#pragma once

#include "draft_class.cuh"
#include "entry_points.cuh"
#include "graph_condition.cuh"
#include "row_end.cuh"
#include "text_accept_params.h"

namespace tide {

constexpr int32_t kMaxTries = 32, kEntry = kMaxDrafts + 2;

// Appends the row's tokens to its text and its ring `entry`; returns how many.
__device__ __forceinline__ int32_t append_tokens(const text_accept_params& v, int row, int64_t* entry) {
  const int32_t tokens = 1 << *v.choice, verified = min(v.guessed[row], tokens - 1);
  const int64_t size = v.length[row] + 1;
  int32_t count = 0;
  entry[0] = verified;
  while (v.finished[row] == kRunning) {
    const int64_t token = v.chosen[int64_t(row) * tokens + count];
    if (token < 0) {
      v.finished[row] = kNoToken;
      break;
    }
    const bool accepted = count < verified && token == v.guess[row * kMaxDrafts + count];
    v.text[row * v.room + size + count] = int32_t(token);
    entry[1 + count++] = token;
    v.finished[row] = end_of_row(v.eos, v.eos_count, token, size + count, v.limit[row]);
    if (!accepted) break;
  }
  for (int i = 1 + count; i < kEntry; ++i) entry[i] = -1;
  v.length[row] += count;
  return count;
}

// `tokens`: the row's new ones, so many.
__device__ __forceinline__ void count_hits(const text_accept_params& v, int row, const int32_t* tokens, int32_t count) {
  for (int i = 0; i < min(count, v.guessed[row]); ++i) {
    const int at = row * v.classes + draft_class(v.least, v.classes, v.matched[row] + i);
    const bool hit = tokens[i] == v.guess[row * kMaxDrafts + i];
    const int32_t tries = v.tries[at] + 1, hits = v.hits[at] + hit, halves = tries == kMaxTries;
    v.tries[at] = tries >> halves, v.hits[at] = hits >> halves;
    if (!hit) break;
  }
}

template <typename T>
__device__ __forceinline__ void text_accept(const text_accept_params& v) {
  const int64_t turn = v.counts[0];
  int64_t* entries = v.ring + (turn % v.ring_turns) * v.rows * kEntry;
  bool running = false, needs_host = false;
  for (int row = threadIdx.x; row < v.rows; row += blockDim.x) {
    const int32_t* tokens = v.text + row * v.room + v.length[row] + 1;
    count_hits(v, row, tokens, append_tokens(v, row, entries + row * kEntry));
    const bool runs = v.finished[row] == kRunning;
    running = running || runs;
    needs_host = needs_host || v.finished[row] == kNoToken || (runs && v.length[row] + kMaxDrafts + 1 > v.bound[row]);
  }
  __threadfence_system();  // the host reads the entry when it sees the count
  const bool any_running = __syncthreads_or(running) != 0, stops = __syncthreads_or(needs_host) != 0;
  if (threadIdx.x != 0) return;
  v.counts[0] = turn + 1;
  const int32_t left = *v.turns_left - 1, proceed = any_running && !stops && left > 0;
  *v.turns_left = left, *v.proceed = proceed;
  set_graph_condition(v.sets_condition, v.graph_condition, proceed);
}

}  // namespace tide

TIDE_ENTRY_POINT(text_accept, f32, float, text_accept_params, tide::kLoopThreads)
