// Detection of the block that finishes last, which completes the work of all blocks without a second launch (the pattern of CUDA's
// threadFenceReduction sample). The counter wraps to zero at the last block, so a captured launch can be replayed.
#pragma once

#include "portable.h"

namespace tide {

// True in every thread of the last of `blocks` to call it, which has to read the other blocks' results by __ldcg.
__device__ __forceinline__ bool last_block(uint32_t* counter, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace tide
