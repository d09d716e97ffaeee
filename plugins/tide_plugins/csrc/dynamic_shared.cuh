// The launch's dynamic shared memory. Host compilers lack this storage class, so host builds define the function.
#pragma once

#include "portable.h"

namespace tide {

// Static shared memory comes first, so that without it the dynamic one starts on any multiple of 16 bytes. 128: a swizzled stage
// has its banks as computed, and rows suit every instruction that reads them.
constexpr int kDynamicSharedAlignment = 128;

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
