// Copy of one hidden state by the threads of a block.
#pragma once

#include "portable.h"

namespace tide {

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

__device__ __forceinline__ void copy_state(const uint8_t* from, uint8_t* to, int64_t bytes) {
  if ((reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | uint64_t(bytes)) % 16 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
      reinterpret_cast<Bytes16*>(to)[i] = reinterpret_cast<const Bytes16*>(from)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
  }
}

}  // namespace tide
