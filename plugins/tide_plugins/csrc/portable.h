// The header of fixed-width integers, which NVRTC lacks and the C++17 host compilers of tests have.
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
