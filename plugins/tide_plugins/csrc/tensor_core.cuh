// Products of small matrices on tensor cores, written as PTX because <mma.h> needs headers of nvcc that no NVRTC package brings.
//
//   sm_75 and newer   `ldmatrix` and `mma` (PTX ISA, "Matrix Fragments for mma.m16n8k16"), whose fragments' layouts are specified;
//                     rows need 16-byte alignment. __half from sm_75 on, __nv_bfloat16 from sm_80 on.
//   sm_70             `wmma`, __half only. A row of a fragment needs an alignment of the fragment's size, 32 bytes: base and pitch
//                     (PTX ISA, "Matrix Storage" of the WMMA instructions).
//
// TIDE_TENSOR_CORES: the architecture whose instructions are used; 0: none. Host tests define it and emulate the instructions,
// including their alignment rules (tests/plugins/host_shim/tensor_core_on_host.h).
#pragma once

#include "element.cuh"

#ifdef __CUDA_ARCH__
#define TIDE_TENSOR_CORES (__CUDA_ARCH__ / 10)
#elif !defined(TIDE_TENSOR_CORES)
#define TIDE_TENSOR_CORES 0
#endif

namespace tide {

template <typename T>
constexpr bool kHasTensorCores = false;
template <>
constexpr bool kHasTensorCores<__half> = TIDE_TENSOR_CORES >= 70;
template <>
constexpr bool kHasTensorCores<__nv_bfloat16> = TIDE_TENSOR_CORES >= 80;

#ifdef __CUDACC__
__device__ __forceinline__ unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }
#endif

#if TIDE_TENSOR_CORES >= 75
#ifdef __CUDACC__
// Four 8 × 8 matrices of 2-byte elements. Lane l passes the address of row l % 8 of matrix l / 8; matrices[i] gets elements
// 2 (l % 4) and the next of row l / 4 of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

// sums [16, 8] += left [16, 16] · right [16, 8]. left: matrices of rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
// right: rows 0-7, rows 8-15 of the transposed factor. Lane l holds sums of row l / 4, columns 2 (l % 4) and the next, then of
// row l / 4 + 8.
template <typename T>
__device__ __forceinline__ void add_product(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1);

#define TIDE_MMA_16X8X16(type)                                                                         \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                  \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"                \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                            \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1))

template <>
__device__ __forceinline__ void add_product<__half>(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0,
                                                    uint32_t right_1) {
#if TIDE_TENSOR_CORES >= 80
  TIDE_MMA_16X8X16("f16");
#else  // sm_75 multiplies 8 columns at a time
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[0]), "r"(left[1]), "r"(right_0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(left[2]), "r"(left[3]), "r"(right_1));
#endif
}

#if TIDE_TENSOR_CORES >= 80
template <>
__device__ __forceinline__ void add_product<__nv_bfloat16>(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0,
                                                           uint32_t right_1) {
  TIDE_MMA_16X8X16("bf16");
}
#endif
#undef TIDE_MMA_16X8X16
#else
void load_matrices(uint32_t (&matrices)[4], const void* row);
template <typename T>
void add_product(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1);
#endif
#endif

#if TIDE_TENSOR_CORES == 70
// A warp's 16 × 16 accumulator, and 16 rows of 16 consecutive elements: of the left factor, or of the right one's transpose. Their
// layout over lanes is unspecified.
struct WmmaSums {
  float lane[8] = {};
};
struct WmmaRows {
  uint32_t lane[8];
};

#ifdef __CUDACC__
#define TIDE_WMMA_LOAD(factor, layout)                                                                                           \
  asm volatile("wmma.load." factor ".sync.aligned." layout ".m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;\n" \
               : "=r"(rows.lane[0]), "=r"(rows.lane[1]), "=r"(rows.lane[2]), "=r"(rows.lane[3]), "=r"(rows.lane[4]),             \
                 "=r"(rows.lane[5]), "=r"(rows.lane[6]), "=r"(rows.lane[7])                                                      \
               : "r"(shared_address(from)), "r"(pitch)                                                                           \
               : "memory")
__device__ __forceinline__ void wmma_load_left(WmmaRows& rows, const __half* from, int pitch) { TIDE_WMMA_LOAD("a", "row"); }
__device__ __forceinline__ void wmma_load_right(WmmaRows& rows, const __half* from, int pitch) { TIDE_WMMA_LOAD("b", "col"); }
#undef TIDE_WMMA_LOAD

__device__ __forceinline__ void wmma_add_product(WmmaSums& sums, const WmmaRows& left, const WmmaRows& right) {
  float* s = sums.lane;
  const uint32_t *a = left.lane, *b = right.lane;
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};\n"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(b[2]),
        "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
}

// `out` is in global memory.
__device__ __forceinline__ void wmma_store(float* out, int pitch, const WmmaSums& sums) {
  const float* s = sums.lane;
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;\n" ::"l"(out),
               "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]), "f"(s[4]), "f"(s[5]), "f"(s[6]), "f"(s[7]), "r"(pitch)
               : "memory");
}
#else
void wmma_load_left(WmmaRows& rows, const __half* from, int pitch);
void wmma_load_right(WmmaRows& rows, const __half* from, int pitch);
void wmma_add_product(WmmaSums& sums, const WmmaRows& left, const WmmaRows& right);
void wmma_store(float* out, int pitch, const WmmaSums& sums);
#endif
#endif

}  // namespace tide
