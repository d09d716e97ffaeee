// Sample an index from weights by inversion in one block: the first index whose cumulated weight exceeds u times the total.
// Each warp sums one part of the range; then the part that contains the target is divided among the warps.
#pragma once

#include "portable.h"
#include "warp_sum.cuh"

namespace tide {

struct Choice {
  int index;     // -1: no weight
  float before;  // weight of the parts before it
};

// Selects among `count` <= 32 parts. If rounding leaves the target after all of them, selects the last part with weight.
__device__ __forceinline__ Choice choose_part(const float* parts, int count, float target) {
  Choice choice = {-1, 0.0f};
  float before = 0.0f;
  for (int i = 0; i < count; ++i) {
    if (!(parts[i] > 0.0f)) continue;
    choice = {i, before};
    before += parts[i];
    if (target < before) break;
  }
  return choice;
}

// `weight(i)` for i < size, `u` in [0, 1). Every thread gets the index; -1 when the weights have no finite positive sum.
template <typename Weight>
__device__ __forceinline__ int draw_index(Weight weight, int size, float u) {
  __shared__ float parts[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float target = -1.0f;  // of the part; not known before the first sum
  for (int begin = 0, end = size;;) {
    const int width = (end - begin + 31) / 32, count = (end - begin + width - 1) / width;
    for (int part = warp; part < count; part += warps) {
      const int first = begin + part * width, last = min(first + width, end);
      float sum = 0.0f;
      for (int i = first + lane; i < last; i += 32) sum += weight(i);
      sum = warp_sum(sum);
      if (lane == 0) parts[part] = sum;
    }
    __syncthreads();
    if (target < 0.0f) {
      float total = 0.0f;
      for (int i = 0; i < count; ++i) total += parts[i];
      if (!(total > 0.0f && total <= 3.402823466e38f)) return -1;
      target = u * total;
    }
    const Choice choice = choose_part(parts, count, target);
    begin += choice.index * width;
    if (width == 1) return begin;
    end = min(begin + width, end);
    target = fmaxf(target - choice.before, 0.0f);
    __syncthreads();  // every thread has read the parts
  }
}

}  // namespace tide
