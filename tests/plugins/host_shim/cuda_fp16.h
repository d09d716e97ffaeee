// __half on the host, by the compiler's own _Float16: IEEE 754 binary16, rounded to nearest even.
#pragma once

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return float(x.value); }
inline __half __float2half_rn(float x) { return {_Float16(x)}; }
