// One 16 × 16 × 16 step of a matrix product on tensor cores: PTX's `wmma` instructions (PTX ISA, "Warp Level Matrix
// Multiply-Accumulate"), written out because <mma.h> needs headers of nvcc that no NVRTC package brings.
//
// __half from sm_70 on, __nv_bfloat16 from sm_80 on. Runs on a GPU only: `make gpu-check` executes it, no host test can.
#pragma once

#include "element.cuh"

namespace tide {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
constexpr int kTensorCoreSize = 16;

// A warp's 16 × 16 accumulator; its layout over lanes is unspecified.
struct TensorCoreSums {
  float lane[8] = {};
};

// `out` is in global memory.
__device__ __forceinline__ void store_sums(float* out, int pitch, const TensorCoreSums& sums) {
  const float* s = sums.lane;
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;\n" ::"l"(out),
               "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]), "f"(s[4]), "f"(s[5]), "f"(s[6]), "f"(s[7]), "r"(pitch)
               : "memory");
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

// 16 rows of 16 consecutive elements in shared memory: of the left factor, or of the right one's transpose.
template <typename T>
struct TensorCoreRows;

template <>
struct TensorCoreRows<__half> {
  uint32_t lane[8];

#define TIDE_LOAD_F16(factor, layout)                                                                                            \
  asm volatile("wmma.load." factor ".sync.aligned." layout ".m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;\n" \
               : "=r"(lane[0]), "=r"(lane[1]), "=r"(lane[2]), "=r"(lane[3]), "=r"(lane[4]), "=r"(lane[5]), "=r"(lane[6]),        \
                 "=r"(lane[7])                                                                                                   \
               : "r"(shared_address(from)), "r"(pitch)                                                                           \
               : "memory")
  __device__ __forceinline__ void load_left(const __half* from, int pitch) { TIDE_LOAD_F16("a", "row"); }
  __device__ __forceinline__ void load_right(const __half* from, int pitch) { TIDE_LOAD_F16("b", "col"); }
#undef TIDE_LOAD_F16
};

__device__ __forceinline__ void add_product(TensorCoreSums& sums, const TensorCoreRows<__half>& left,
                                            const TensorCoreRows<__half>& right) {
  float* s = sums.lane;
  const uint32_t *a = left.lane, *b = right.lane;
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};\n"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(b[2]),
        "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
}

#if __CUDA_ARCH__ >= 800
template <>
struct TensorCoreRows<__nv_bfloat16> {
  uint32_t lane[4];

#define TIDE_LOAD_BF16(factor, layout)                                                                            \
  asm volatile("wmma.load." factor ".sync.aligned." layout ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n" \
               : "=r"(lane[0]), "=r"(lane[1]), "=r"(lane[2]), "=r"(lane[3])                                       \
               : "r"(shared_address(from)), "r"(pitch)                                                            \
               : "memory")
  __device__ __forceinline__ void load_left(const __nv_bfloat16* from, int pitch) { TIDE_LOAD_BF16("a", "row"); }
  __device__ __forceinline__ void load_right(const __nv_bfloat16* from, int pitch) { TIDE_LOAD_BF16("b", "col"); }
#undef TIDE_LOAD_BF16
};

__device__ __forceinline__ void add_product(TensorCoreSums& sums, const TensorCoreRows<__nv_bfloat16>& left,
                                            const TensorCoreRows<__nv_bfloat16>& right) {
  float* s = sums.lane;
  const uint32_t *a = left.lane, *b = right.lane;
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};\n"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
}
#endif
#endif

}  // namespace tide
