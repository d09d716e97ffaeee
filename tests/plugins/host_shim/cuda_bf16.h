// __nv_bfloat16 on the host: the upper half of a float, rounded to nearest even, NaN kept.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {uint16_t(0x7FFF)};
  return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
