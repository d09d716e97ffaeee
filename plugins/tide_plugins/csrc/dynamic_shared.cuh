// The launch's dynamic shared memory. Host compilers lack this storage class, so host builds define the function.
#pragma once

#include "portable.h"

namespace tide {

constexpr int kDynamicSharedAlignment = 16;  // of a float4

#ifdef __CUDACC__
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(kDynamicSharedAlignment) unsigned char tide_dynamic_shared[];
  return reinterpret_cast<T*>(tide_dynamic_shared);
}
#else
template <typename T>
T* dynamic_shared();
#endif

}  // namespace tide
