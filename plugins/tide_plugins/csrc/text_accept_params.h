// Parameters of `text_accept`, which is launched as one block.
#pragma once

#include "text_drafts.h"

namespace tide {

struct text_accept_params {
  const int64_t* chosen;   // room for [rows, 16]; read: [rows, tokens], the model's token after each; negative: it has none
  const int32_t* choice;   // scalar: the power of two that is `tokens`
  const int32_t* guess;    // [rows, 15] of `text_drafts`
  const int32_t* guessed;  // [rows]
  const int32_t* matched;  // [rows]
  const int32_t* least;    // [classes]
  const int64_t* eos;      // [eos_count] ids that end a row, or null
  const int64_t* limit;    // [rows] most tokens of prompt and output
  const int64_t* bound;    // [rows] the loop ends where the next pass could write behind so many slots
  int32_t* text;           // [rows, room] in and out
  int64_t* length;         // [rows] in and out: cached tokens
  uint8_t* finished;       // [rows] in and out: 0 running, 1 eos, 2 limit, 3 no token
  int32_t* hits;           // [rows, classes] in and out
  int32_t* tries;          // [rows, classes] in and out
  int32_t* turns_left;     // scalar, in and out
  int64_t* ring;           // [ring_turns, rows, 17] pinned: drafts verified, tokens, then -1
  int64_t* counts;         // turns written
  int32_t* proceed;        // scalar: whether rows are running, none needs the host, and turns are left
  uint64_t graph_condition;
  int64_t room;
  int32_t rows;
  int32_t classes;
  int32_t eos_count;
  int32_t ring_turns;
  int32_t sets_condition;
  int32_t reserved;
};

}  // namespace tide
