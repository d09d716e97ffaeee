// Parameters of `text_drafts`, which is launched as one block for each row.
#pragma once

#include "text_drafts.h"

namespace tide {

struct text_drafts_params {
  const int32_t* text;      // [rows, room] tokens of each row: length + 1
  const int64_t* length;    // [rows] cached tokens
  const int64_t* limit;     // [rows] most tokens of prompt and output
  const uint8_t* finished;  // [rows] 0: running
  const int32_t* hits;      // [rows, classes] drafts that were right
  const int32_t* tries;     // [rows, classes] and all
  const int32_t* least;     // [classes] least matched tokens of a class, rising
  const float* prior;       // [classes] `weight` times a class's usual rate
  const float* prices;      // [sizes] time of a pass over 2^i tokens of each row
  int32_t* guess;           // [rows, 15] the tokens that may follow
  int32_t* guessed;         // [rows] how many
  int32_t* matched;         // [rows] length of the match before the first
  float* expected;          // [rows, sizes] expected tokens of a pass over 2^i tokens
  int64_t* input_ids;       // room for [rows, 16]; written: [rows, tokens], the next pass's inputs; each may be null
  int64_t* position_ids;    // likewise
  int32_t* position_ids32;
  int64_t* write_index;  // [rows]
  int32_t* write_index32;
  int32_t* seqlens_k;  // [rows]
  int32_t* choice;     // scalar: the power of two that is `tokens`
  uint32_t* counters;  // [1] zero
  uint64_t graph_condition;
  int64_t room;  // a multiple of four
  int64_t slots;
  int32_t rows;
  int32_t classes;
  int32_t sizes;
  int32_t draft_limit;  // most drafts of a row and turn
  float weight;         // tries that a usual rate counts as
  int32_t sets_condition;
};

}  // namespace tide
