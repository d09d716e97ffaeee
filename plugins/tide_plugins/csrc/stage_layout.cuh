// Layout of a pipeline stage in shared memory: lines of 64 bytes, each four pieces of 16 bytes.
//
// Piece p of line l is at place p ^ (l / 2 % 4) of its line, so that the same piece of eight consecutive lines, which `ldmatrix` and
// the CUDA core form read at once, is in all 32 banks. `wmma` takes lines with a constant pitch only: there the pieces stay in order.
#pragma once

#include "down_projection_plan.h"
#include "row_piece.cuh"
#include "tensor_core.cuh"

namespace tide {

constexpr int kStagePieces = kStageBytes / 16;
template <typename T>
constexpr int kStageDepth = kStageBytes / int(sizeof(T));
template <typename T>
constexpr bool kPiecesInOrder = TIDE_TENSOR_CORES == 70 && kHasTensorCores<T>;

// Elements from the start of the stage to a piece.
template <typename T>
__device__ __forceinline__ int piece_offset(int line, int piece) {
  const int place = kPiecesInOrder<T> ? piece : piece ^ (line / 2 % kStagePieces);
  return line * kStageDepth<T> + place * Piece<T>::kSize;
}

}  // namespace tide
