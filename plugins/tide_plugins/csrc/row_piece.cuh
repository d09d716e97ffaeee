// 16 bytes of a row: one load where the row's address allows it, elements at its tail or where it does not.
#pragma once

#include "element.cuh"

namespace tide {

template <typename T>
struct alignas(16) Piece {
  static constexpr int kSize = 16 / int(sizeof(T));
  T elements[kSize];
};

// Whether every row that starts `stride` elements after another starts on 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_aligned(const void* base, int64_t stride) {
  return (reinterpret_cast<uint64_t>(base) | uint64_t(stride) * sizeof(T)) % 16 == 0;
}

// Elements at … at + kSize of a row of `size`, as floats; zeros after its end.
template <typename T, int kSize>
__device__ __forceinline__ void load_row(const T* row, int at, int size, bool aligned, float (&wide)[kSize]) {
  constexpr int kPiece = Piece<T>::kSize;
  static_assert(kSize % kPiece == 0, "whole pieces");
#pragma unroll
  for (int begin = 0; begin < kSize; begin += kPiece) {
    if (aligned && at + begin + kPiece <= size) {
      const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(row + at + begin);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) wide[begin + i] = to_float(piece.elements[i]);
    } else {
#pragma unroll
      for (int i = begin; i < begin + kPiece; ++i) wide[i] = at + i < size ? to_float(row[at + i]) : 0.0f;
    }
  }
}

}  // namespace tide
