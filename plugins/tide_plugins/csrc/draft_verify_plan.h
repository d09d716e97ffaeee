// Parameters and launch plan of `draft_verify`.
#pragma once

#include "launch_plan.h"

namespace tide {

struct draft_verify_params {
  const int64_t* drafts;       // [rows, width] draft ids, of which the first draft_count[b] are used
  const int32_t* draft_count;  // [rows] 0 … width
  const int64_t* deep_tokens;  // [rows, width + 1] the model's argmax after the last token and after each draft; greedy only
  const void* probabilities;   // T [rows, width + 1, vocab] the model's distributions; null: greedy
  const void* proposals;       // T [rows, width, vocab] distributions that drafts were sampled from; null: deterministic
  const uint64_t* seed;        // [rows] sampling only
  const int64_t* eos;          // [eos_count] ids that end a row, or null
  const int64_t* limit;        // [rows] most tokens of prompt and output: min(prompt + max_new_tokens, cache_slots + 1)
  int64_t* length;             // [rows] in and out: tokens whose K/V stay cached = write index and position id of the next token
  int64_t* last_token;         // [rows] in and out: the next step's first input id
  uint8_t* finished;           // [rows] in and out: 0 running, 1 eos, 2 limit, 3 invalid distribution
  int32_t* accepted;           // [rows] number of accepted drafts
  int32_t* emitted;            // [rows] new output tokens
  int64_t* tokens;             // [rows, width + 1] those tokens, then -1
  int32_t* running;            // scalar: rows not finished
  uint32_t* counters;          // zero before the first launch
  uint64_t graph_condition;    // cudaGraphConditionalHandle that is set to *running
  int32_t rows;
  int32_t width;
  int32_t vocab;  // of probabilities and proposals
  int32_t eos_count;
  int32_t sets_condition;  // whether graph_condition is a handle
  int32_t reserved;
};

constexpr int32_t kMostVerifyThreads = 1024;

inline TIDE_HOST_DEVICE LaunchPlan plan_draft_verify(int64_t rows, int32_t vocab, bool sampling) {
  const int64_t threads = sampling ? clamp(round_up(divide_up(vocab, 16), 32), 32, kMostVerifyThreads) : 32;
  return {{uint32_t(rows > 0 ? rows : 1), 1, 1}, {uint32_t(threads), 1, 1}, 0, 1, 0};
}

}  // namespace tide
