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

// Elements at … at + kSize of a row of `size`; zeros after its end.
template <typename T>
__device__ __forceinline__ Piece<T> load_piece(const T* row, int at, int size, bool aligned) {
  if (aligned && at + Piece<T>::kSize <= size) return *reinterpret_cast<const Piece<T>*>(row + at);
  Piece<T> piece;
#pragma unroll
  for (int i = 0; i < Piece<T>::kSize; ++i) piece.elements[i] = at + i < size ? row[at + i] : from_float<T>(0.0f);
  return piece;
}

template <typename T>
__device__ __forceinline__ void store_piece(T* row, int at, int size, bool aligned, const Piece<T>& piece) {
  if (aligned && at + Piece<T>::kSize <= size) {
    *reinterpret_cast<Piece<T>*>(row + at) = piece;
    return;
  }
#pragma unroll
  for (int i = 0; i < Piece<T>::kSize; ++i)
    if (at + i < size) row[at + i] = piece.elements[i];
}

template <typename T>
__device__ __forceinline__ void widen(const Piece<T>& piece, float (&wide)[Piece<T>::kSize]) {
#pragma unroll
  for (int i = 0; i < Piece<T>::kSize; ++i) wide[i] = to_float(piece.elements[i]);
}

}  // namespace tide
