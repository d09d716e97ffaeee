// Partition of 0 … rows - 1 by a flag into two ascending lists, by one block.
#pragma once

#include "portable.h"
#include "warp_sum.cuh"

namespace tide {

constexpr int kFlagsPerThread = 16;

// Exclusive prefix sum of `value` over the block's threads; `total` gets the full sum. blockDim.x is a multiple of 32.
__device__ __forceinline__ int block_exclusive_sum(int value, int& total) {
  __shared__ int warp_totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int lower = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += lower;
  }
  __syncthreads();  // the previous call's totals have been read
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < warps; ++i) {
    if (i < warp) before += warp_totals[i];
    total += warp_totals[i];
  }
  return before + inclusive - value;
}

// Bit i: flag at + i. Read past L1, since other blocks wrote them.
__device__ __forceinline__ unsigned flag_bits(const uint8_t* flags, int at, int rows) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kFlagsPerThread; ++i)
    if (at + i < rows && __ldcg(flags + at + i)) bits |= 1u << i;
  return bits;
}

// Writes the rows whose flag is set to `ones` and the others to `zeros`; returns the number of ones to every thread.
__device__ __forceinline__ int ordered_partition(const uint8_t* flags, int rows, int32_t* ones, int32_t* zeros) {
  int ones_before = 0;
  for (int base = 0; base < rows; base += int(blockDim.x) * kFlagsPerThread) {
    const int begin = base + int(threadIdx.x) * kFlagsPerThread;
    const unsigned bits = flag_bits(flags, begin, rows);
    int total;
    int one = ones_before + block_exclusive_sum(__popc(bits), total), zero = begin - one;
    for (int i = 0; i < kFlagsPerThread && begin + i < rows; ++i) {
      if (bits >> i & 1u)
        ones[one++] = begin + i;
      else
        zeros[zero++] = begin + i;
    }
    ones_before += total;
  }
  return ones_before;
}

}  // namespace tide
