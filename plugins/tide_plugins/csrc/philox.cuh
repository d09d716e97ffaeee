// Philox4x32-10, the counter-based random numbers of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"): a number
// is a function of (key, counter), so a token's random number does not depend on how many drafts were tried before.
#pragma once

#include "portable.h"

namespace tide {

struct Philox {
  uint32_t words[4];
};

__device__ __forceinline__ Philox philox_4x32_10(const Philox& counter, uint64_t key) {
  uint32_t c0 = counter.words[0], c1 = counter.words[1], c2 = counter.words[2], c3 = counter.words[3];
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b), c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A 24-bit number in [0, 1) for a token's position and a purpose.
__device__ __forceinline__ float uniform_at(uint64_t seed, int64_t position, uint32_t purpose) {
  const Philox counter = {{uint32_t(position), uint32_t(uint64_t(position) >> 32), purpose, 0u}};
  return float(philox_4x32_10(counter, seed).words[0] >> 8) * 0x1p-24f;
}

}  // namespace tide
