// A warp's 32 × kWidth share of a product, summed in float32: sums += left [32, depth] · right [kWidth, depth]^T, where both factors
// are lines of a stage (stage_layout.cuh).
//
// Tensor cores multiply __half and __nv_bfloat16 where the GPU has them for the type (tensor_core.cuh); float keeps its 24 bits on
// CUDA cores.
#pragma once

#include "stage_layout.cuh"

namespace tide {

// Lane l sums rows l / 8 + 4 i and columns l % 8 + 8 j.
template <typename T, int kWidth>
struct CudaCoreTile {
  float sums[kWarpRows / 4][kWidth / 8] = {};

  __device__ __forceinline__ void add_stage(const T* stage, int left, int right) {
    constexpr int kSize = Piece<T>::kSize, kDepth = kStageDepth<T>;
    const int row = left + threadIdx.x % 32 / 8, column = right + threadIdx.x % 8;
#pragma unroll 1
    for (int piece = 0; piece < kStagePieces; ++piece) {
      // Lines 8 apart have their pieces in the same order.
      const T* rows[2] = {stage + piece_offset<T>(row, piece), stage + piece_offset<T>(row + 4, piece)};
      const T* columns = stage + piece_offset<T>(column, piece);
#pragma unroll 2  // unrolled further, it does not fit the registers on sm_70
      for (int k = 0; k < kSize; ++k) {
        float factors[kWidth / 8];
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) factors[j] = to_float(columns[8 * j * kDepth + k]);
#pragma unroll
        for (int i = 0; i < kWarpRows / 4; ++i) {
          const float factor = to_float(rows[i % 2][i / 2 * 8 * kDepth + k]);
#pragma unroll
          for (int j = 0; j < kWidth / 8; ++j) sums[i][j] += factor * factors[j];
        }
      }
    }
  }

  __device__ __forceinline__ void store(float* out, int pitch) const {
    float* corner = out + threadIdx.x % 32 / 8 * pitch + threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i)
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) corner[4 * i * pitch + 8 * j] = sums[i][j];
  }
};

#if TIDE_TENSOR_CORES >= 75
template <typename T, int kWidth>
struct TensorCoreTile {
  float sums[kWarpRows / 16][kWidth / 8][4] = {};

  __device__ __forceinline__ void add_stage(const T* stage, int left, int right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int piece = 0; piece < kStagePieces; piece += 2) {
      uint32_t rows[kWarpRows / 16][4], columns[4];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i)
        load_matrices(rows[i], stage + piece_offset<T>(left + 16 * i + lane % 16, piece + lane / 16));
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) {  // two matrices of 8 columns: columns[0], [1] and columns[2], [3]
        load_matrices(columns, stage + piece_offset<T>(right + 16 * j + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < kWarpRows / 16; ++i) {
          add_product<T>(sums[i][2 * j], rows[i], columns[0], columns[1]);
          add_product<T>(sums[i][2 * j + 1], rows[i], columns[2], columns[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(float* out, int pitch) const {
    float* corner = out + threadIdx.x % 32 / 4 * pitch + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        *reinterpret_cast<float2*>(corner + 16 * i * pitch + 8 * j) = {sums[i][j][0], sums[i][j][1]};
        *reinterpret_cast<float2*>(corner + (16 * i + 8) * pitch + 8 * j) = {sums[i][j][2], sums[i][j][3]};
      }
  }
};
#elif TIDE_TENSOR_CORES == 70
template <typename T, int kWidth>
struct TensorCoreTile {
  WmmaSums sums[kWarpRows / 16][kWidth / 16];

  __device__ __forceinline__ void add_stage(const T* stage, int left, int right) {
    constexpr int kDepth = kStageDepth<T>;
#pragma unroll 1  // unrolled, the fragments of two steps do not fit the registers
    for (int k = 0; k < kDepth; k += 16) {
      WmmaRows rows[kWarpRows / 16], columns;
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) wmma_load_left(rows[i], stage + (left + 16 * i) * kDepth + k, kDepth);
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) {
        wmma_load_right(columns, stage + (right + 16 * j) * kDepth + k, kDepth);
#pragma unroll
        for (int i = 0; i < kWarpRows / 16; ++i) wmma_add_product(sums[i][j], rows[i], columns);
      }
    }
  }

  __device__ __forceinline__ void store(float* out, int pitch) const {
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) wmma_store(out + 16 * i * pitch + 16 * j, pitch, sums[i][j]);
  }
};
#endif

template <typename T, int kWidth, bool kTensorCores = kHasTensorCores<T>>
struct WarpTile : CudaCoreTile<T, kWidth> {};
#if TIDE_TENSOR_CORES >= 70
template <typename T, int kWidth>
struct WarpTile<T, kWidth, true> : TensorCoreTile<T, kWidth> {};
#endif

}  // namespace tide
