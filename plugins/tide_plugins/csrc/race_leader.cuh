// The largest of some scores, of the lowest token among equals, and how close the second comes.
#pragma once

#include "warp_sum.cuh"

namespace tide {

constexpr uint32_t kDoubtful = 0x80000000u;  // beside a token: filters may drop it
constexpr float kLargest = 3.402823466e38f, kNoScore = -kLargest;

struct Leader {
  float best = kNoScore, second = kNoScore;
  uint32_t token = 0;

  __device__ void meet(float other, float other_second, uint32_t other_token) {
    const bool behind = other > best || (other == best && other_token < token);
    const float loser = behind ? best : other;
    if (behind) best = other, token = other_token, second = other_second;
    second = fmaxf(second, loser);
  }

  // Whether rounding, less than 2e-7 of a score and of its noise (37 at most), cannot have swapped the first two.
  __device__ bool is_clear() const {
    return best > kNoScore && (second == kNoScore || best - second > 4e-5f + 4e-7f * (fabsf(best) + fabsf(second)));
  }
};

__device__ __forceinline__ void warp_meet(Leader& leader) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float best = __shfl_xor_sync(kAllLanes, leader.best, offset), second = __shfl_xor_sync(kAllLanes, leader.second, offset);
    leader.meet(best, second, __shfl_xor_sync(kAllLanes, leader.token, offset));
  }
}

// The leader of all threads of a block of kThreads, in its first warp.
template <int kThreads>
__device__ __forceinline__ void block_meet(Leader& leader) {
  __shared__ float best[kThreads / 32], second[kThreads / 32];
  __shared__ uint32_t token[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  warp_meet(leader);
  __syncthreads();  // an earlier call may still read
  if (lane == 0) best[warp] = leader.best, second[warp] = leader.second, token[warp] = leader.token;
  __syncthreads();
  if (warp != 0) return;
  leader = Leader();
  if (lane < kThreads / 32) leader.meet(best[lane], second[lane], token[lane]);
  warp_meet(leader);
}

}  // namespace tide
