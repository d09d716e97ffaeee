// What NVRTC, nvcc and a C++17 host compiler do not agree on: where fixed-width integers come from, and how a function that both
// sides call is marked. Plans and parameter structs are included by all three.
#pragma once

#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define TIDE_HOST_DEVICE __host__ __device__
#else
#define TIDE_HOST_DEVICE
#endif
