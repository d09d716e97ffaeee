// Sums over the lanes of a warp, in a fixed order.
#pragma once

#include "portable.h"

namespace tide {

constexpr unsigned kAllLanes = 0xffffffffu;

// The sum of 32 values, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// kValues sums over kLanes neighbouring lanes at once: each exchange halves the values a lane still carries, so 16 sums over a
// warp take 16 shuffles instead of 80. Lane l gets sum number (l % kLanes) / (kLanes / kValues).
template <int kValues, int kLanes>
__device__ __forceinline__ float transposed_sum(const float (&values)[kValues]) {
  constexpr int kHalf = kValues / 2, kOffset = kLanes / 2;
  const bool upper = threadIdx.x & kOffset;
  float kept[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? values[i] : values[i + kHalf];
    kept[i] = (upper ? values[i + kHalf] : values[i]) + __shfl_xor_sync(kAllLanes, sent, kOffset);
  }
  if constexpr (kHalf > 1) {
    return transposed_sum<kHalf, kOffset>(kept);
  } else {
    float sum = kept[0];
#pragma unroll
    for (int offset = kOffset / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    return sum;
  }
}

}  // namespace tide
