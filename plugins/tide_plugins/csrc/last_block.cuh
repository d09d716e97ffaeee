// Which block finishes last: it finds what all others wrote and completes the work without a second launch (the pattern of CUDA's
// threadFenceReduction sample). The counter wraps to zero at the last block, so a captured launch can be replayed.
#pragma once

#include "portable.h"

namespace tide {

// True in every thread of the block that is the last of `blocks` to ask. What other blocks wrote is then to be read by __ldcg.
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
