// Parameters of `choose_token`, whose three kernels are launched one after the other as grids of (blocks per row, rows).
#pragma once

#include "portable.h"

namespace tide {

constexpr int32_t kChooseThreads = 256;
constexpr int32_t kMaxChooseBlocks = 32;  // of a row
constexpr int32_t kBins = 2048;           // of scores from 0 to -32; one more bin has all that are lower
constexpr int32_t kMaxListed = 2048;      // tokens near the cuts of top-k and top-p

// Memory of a row between the kernels.
struct choose_token_scratch {
  uint64_t weights[kBins + 2];  // of the tokens in each bin; then of those in all bins before it
  uint32_t counts[kBins + 2];  // as `weights`
  float peak;
  float best[kMaxChooseBlocks];
  float second[kMaxChooseBlocks];
  uint32_t leader[kMaxChooseBlocks];
  int32_t listed[kMaxListed];
  int32_t list_size;
  int32_t top_k_bin;
  int32_t first_bin;
  int32_t last_bin;
};
constexpr int32_t kChooseScratch = 33200;
static_assert(sizeof(choose_token_scratch) == kChooseScratch, "plans.py reserves as much");

struct choose_token_params {
  const void* logits;           // [rows, vocab] T; rows = sequences · tokens
  const float* temperature;     // [sequences] 0: the likeliest token is taken
  const int32_t* top_k;         // [sequences] 0: off
  const float* tail;            // [sequences] 1 - top_p; 0: off
  const float* min_p;           // [sequences] 0: off
  const uint64_t* key;          // [sequences, 2] of the noise
  const int64_t* length;        // [sequences] cached tokens before the step
  const uint8_t* finished;      // [sequences] 0: the row is wanted
  int64_t* chosen;              // [rows] -1: the host has to look; unchanged where the row is not wanted
  choose_token_scratch* workspace;  // [rows]
  uint32_t* counters;           // [rows] zero before the first launch
  int32_t rows;
  int32_t vocab;
  int32_t tokens;  // rows of a sequence, for tokens one after the other
  int32_t reserved;
};

}  // namespace tide
