// A warp's 32 × 64 share of a product, summed in float32: sums += a [32, depth] · b [64, depth]^T from shared memory.
//
// Tensor cores multiply __half from sm_70 on and __nv_bfloat16 from sm_80 on. float keeps its 24 bits on CUDA cores, as do older
// GPUs and a host. The tensor core form runs on a GPU only: `make gpu-check` runs it, host tests the form for CUDA cores.
#pragma once

#include "down_projection_plan.h"
#include "tensor_core.cuh"

namespace tide {

// Lane l sums rows l / 8 + 4 i and columns l % 8 + 8 j.
template <typename T>
struct WarpTile {
  float sums[kWarpRows / 4][kWarpWidth / 8] = {};

  __device__ __forceinline__ void add_product(const T* a, const T* b, int pitch, int depth) {
    const int lane = threadIdx.x % 32;
    for (int k = 0; k < depth; ++k) {
      float column[kWarpWidth / 8];
#pragma unroll
      for (int j = 0; j < kWarpWidth / 8; ++j) column[j] = to_float(b[(lane % 8 + 8 * j) * pitch + k]);
#pragma unroll
      for (int i = 0; i < kWarpRows / 4; ++i) {
        const float row = to_float(a[(lane / 8 + 4 * i) * pitch + k]);
#pragma unroll
        for (int j = 0; j < kWarpWidth / 8; ++j) sums[i][j] += row * column[j];
      }
    }
  }

  __device__ __forceinline__ void store(float* out, int pitch) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i)
#pragma unroll
      for (int j = 0; j < kWarpWidth / 8; ++j) out[(lane / 8 + 4 * i) * pitch + lane % 8 + 8 * j] = sums[i][j];
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
template <typename T>
struct TensorCoreTile {
  static constexpr int kSize = kTensorCoreSize;
  TensorCoreSums sums[kWarpRows / kSize][kWarpWidth / kSize];

  __device__ __forceinline__ void add_product(const T* a, const T* b, int pitch, int depth) {
#pragma unroll 1  // on sm_70, unrolled, the fragments of two steps do not fit the registers
    for (int k = 0; k < depth; k += kSize) {
      TensorCoreRows<T> rows[kWarpRows / kSize], columns;
#pragma unroll
      for (int i = 0; i < kWarpRows / kSize; ++i) rows[i].load_left(a + i * kSize * pitch + k, pitch);
#pragma unroll
      for (int j = 0; j < kWarpWidth / kSize; ++j) {
        columns.load_right(b + j * kSize * pitch + k, pitch);
#pragma unroll
        for (int i = 0; i < kWarpRows / kSize; ++i) tide::add_product(sums[i][j], rows[i], columns);
      }
    }
  }

  __device__ __forceinline__ void store(float* out, int pitch) const {
#pragma unroll
    for (int i = 0; i < kWarpRows / kSize; ++i)
#pragma unroll
      for (int j = 0; j < kWarpWidth / kSize; ++j) store_sums(out + i * kSize * pitch + j * kSize, pitch, sums[i][j]);
  }
};

template <>
struct WarpTile<__half> : TensorCoreTile<__half> {};
#if __CUDA_ARCH__ >= 800
template <>
struct WarpTile<__nv_bfloat16> : TensorCoreTile<__nv_bfloat16> {};
#endif
#endif

}  // namespace tide
