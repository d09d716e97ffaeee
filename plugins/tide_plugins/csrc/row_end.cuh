// Why a row of a decode loop ends: `finished` of take_tokens and text_accept.
#pragma once

#include "portable.h"

namespace tide {

constexpr uint8_t kRunning = 0, kEos = 1, kLimit = 2, kNoToken = 3;

// `tokens`: prompt and output up to `token`.
__device__ __forceinline__ uint8_t end_of_row(const int64_t* eos, int eos_count, int64_t token, int64_t tokens, int64_t limit) {
  for (int i = 0; i < eos_count; ++i)
    if (eos[i] == token) return kEos;
  return tokens >= limit ? kLimit : kRunning;
}

}  // namespace tide
