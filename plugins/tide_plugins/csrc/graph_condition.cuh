// Sets the value of a conditional node in a CUDA graph from a kernel, so that control flow needs no host.
// Defined for CUDA 12.4 and later by TIDE_GRAPH_CONDITION; without it the request is ignored.
#pragma once

#include "portable.h"

#if defined(TIDE_GRAPH_CONDITION) && defined(__CUDACC_RTC__)
// NVRTC includes no device runtime header. The compiler knows the name (any other unresolved function is an error), the cubin keeps
// it open, and the driver fills it in when it loads the cubin: no cudadevrt is linked. cuda.core's graph tests do the same.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif

namespace tide {

__device__ __forceinline__ void set_graph_condition(bool wanted, uint64_t handle, int32_t value) {
#ifdef TIDE_GRAPH_CONDITION
  if (wanted) cudaGraphSetConditional(handle, unsigned(value));
#else
  (void)wanted, (void)handle, (void)value;
#endif
}

}  // namespace tide
