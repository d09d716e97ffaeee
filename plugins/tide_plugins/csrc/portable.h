// Differences of NVRTC, nvcc and C++17 host compilers, all of which include plans and parameter structs: the header of fixed-width
// integers, and the marker of functions for host and device.
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
