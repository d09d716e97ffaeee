// Asynchronous 16-byte copies from global to shared memory: cp.async from sm_80 on, synchronous copies before (and on a host).
#pragma once

#include "portable.h"

namespace tide {

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

__device__ __forceinline__ void copy_16_bytes(void* shared, const void* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned target = unsigned(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(global) : "memory");
#else
  *static_cast<Bytes16*>(shared) = *static_cast<const Bytes16*>(global);
#endif
}

// Closes a batch of copies, empty or not.
__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

template <int kBatches>
__device__ __forceinline__ void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kBatches) : "memory");
#endif
}

// Waits until at most `batches` of this thread's batches, are pending. The instruction takes a constant.
__device__ __forceinline__ void wait_copies(int batches) {
  switch (batches) {
    case 6: return wait_copies<6>();
    case 5: return wait_copies<5>();
    case 4: return wait_copies<4>();
    case 3: return wait_copies<3>();
    case 2: return wait_copies<2>();
    case 1: return wait_copies<1>();
    default: return wait_copies<0>();
  }
}

}  // namespace tide
