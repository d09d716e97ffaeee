// Gumbel noise of tide_runtime/gumbel_noise.py: a function of a key, a position and a token id.
#pragma once

#include "portable.h"

namespace tide {

// Output number `group` after counter (0, position, 0, 0) of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy
// as 1, 2, 3"), as NumPy counts: the words of tokens 4 · group to 4 · group + 3.
__device__ __forceinline__ void philox_words(const uint64_t* key, int64_t position, int group, uint64_t (&words)[4]) {
  uint64_t c0 = uint64_t(group) + 1, c1 = uint64_t(position), c2 = 0, c3 = 0, k0 = key[0], k1 = key[1];
  constexpr uint64_t kFirst = 0xD2E7470EE14C6C93u, kSecond = 0xCA5A826395121157u;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t high0 = __umul64hi(kFirst, c0), high1 = __umul64hi(kSecond, c2);
    const uint64_t low0 = kFirst * c0, low1 = kSecond * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// -log(-log(u)), u = (n + 1/2) / 2^52 with the upper 52 bits n of `word`; near 1 from 1 - u, which float32 rounds relative to itself.
__device__ __forceinline__ float gumbel(uint64_t word) {
  constexpr float kUnit = 1.0f / 4503599627370496.0f;
  constexpr uint64_t kMost = (uint64_t(1) << 52) - 1;
  const uint64_t upper = word >> 12;
  const float rate = word >> 63 ? -log1pf(-((float(kMost - upper) + 0.5f) * kUnit)) : -logf((float(upper) + 0.5f) * kUnit);
  return -logf(rate);
}

}  // namespace tide
