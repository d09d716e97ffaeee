// Parameters of `loop_turn`, which is launched as one block.
#pragma once

#include "loop_threads.h"

namespace tide {

struct loop_turn_params {
  const int32_t* emitted;     // [rows] whether the row has a token of this turn
  const uint8_t* exits;       // [rows] number of the exit that the token took, or 0
  const int64_t* length;      // [rows] position of the next token
  const int64_t* last_token;  // [rows] that token, which is the next turn's input
  const int32_t* running;     // scalar: rows not finished
  int32_t* turns_left;        // scalar, in and out
  int64_t* ring;              // [ring_turns, rows] pinned: tokens, + 2^32 times the exit's number, or -1
  int64_t* counts;            // turns written, and what exit_gate and exit_candidates count
  int64_t* input_ids;         // [rows] the next turn's inputs; each may be null
  int64_t* position_ids;      // [rows]
  int32_t* position_ids32;
  int64_t* write_index;  // [rows]
  int32_t* write_index32;
  int32_t* seqlens_k;        // [rows]
  int32_t* proceed;          // scalar: whether rows are running and turns are left
  uint64_t graph_condition;  // cudaGraphConditionalHandle that is set to it
  int64_t slots;             // slots of the KV caches; finished rows write at most to the last one
  int32_t rows;
  int32_t ring_turns;
  int32_t sets_condition;
  int32_t reserved;
};

}  // namespace tide
