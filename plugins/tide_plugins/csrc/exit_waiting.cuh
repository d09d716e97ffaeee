// Number of a row's pending tokens at each exit of a decode loop: `waiting` [exits, rows], exits by number: 1, 2, …
// When the layers between two exits run, they run for all tokens pending at the first.
#pragma once

#include "portable.h"

namespace tide {

__device__ __forceinline__ int32_t waiting_at(const int32_t* waiting, int number, int rows, int row) {
  return waiting[(number - 1) * rows + row];
}

// Number of tokens that arrive at an exit. Those of a running row include its newest token, unless it has exited before.
__device__ __forceinline__ int32_t arrivals(const int32_t* waiting, const uint8_t* finished, int number, int rows, int row) {
  return number == 1 ? int32_t(finished[row] == 0) : waiting_at(waiting, number - 1, rows, row);
}

}  // namespace tide
