// Sizes of an exact loop: drafts of `text_drafts`, which `text_accept` compares with the model's tokens.
#pragma once

#include "loop_threads.h"

namespace tide {

constexpr int32_t kMaxDrafts = 15;     // of a row and turn, so that a pass has up to 16 tokens a row
constexpr int32_t kMaxMatch = 32;      // tokens: longer matches count as such
constexpr int32_t kTextThreads = 512;  // of a block of `text_drafts`

}  // namespace tide
