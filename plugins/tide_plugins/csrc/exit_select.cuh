// exit_select: gather and scatter rows by the lists of exit_router. Copies only, bitwise exact.
//
//   continue_hidden[i]   = hidden[continue_rows[i]]                    gather; in place when continue_hidden is hidden
//   continue_origin[i]   = origin[continue_rows[i]]
//   head_input[origin[r]] = exit_states[r], r in exit_rows             scatter
//   head_input[i]         = exit_states[exit_rows[i]]                  without origin: packed
//
// A thread copies the same 16 bytes of every row of its block. In place, one block processes all rows, so a thread visits rows
// in ascending order and never reads one that it has overwritten: continue_rows[i] >= i. Exited rows are read before any write.
#pragma once

#include "entry_points.cuh"
#include "exit_select_plan.h"
#include "row_piece.cuh"

namespace tide {

constexpr int kRowsInFlight = 8;

template <typename T>
struct RowMatrix {
  T* base;
  int64_t stride;
  __device__ T* operator[](int64_t row) const { return base + row * stride; }
};

// to[place(i)] = from[rows[i]] for the block's items, in the thread's columns; kRowsInFlight rows are read before they are
// written.
template <typename T, typename Place>
__device__ __forceinline__ void move_rows(const RowMatrix<const T>& from, const int32_t* rows, int count, const RowMatrix<T>& to,
                                          int size, Place place) {
  const int at = (blockIdx.y * kSelectThreads + threadIdx.x) * Piece<T>::kSize;
  const bool aligned = rows_aligned<T>(from.base, from.stride) && rows_aligned<T>(to.base, to.stride);
  if (at >= size) return;
  const int step = gridDim.x;
  for (int first = blockIdx.x; first < count; first += step * kRowsInFlight) {
    Piece<T> pieces[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i)
      if (first + i * step < count) pieces[i] = load_piece(from[rows[first + i * step]], at, size, aligned);
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i)
      if (first + i * step < count) store_piece(to[place(first + i * step)], at, size, aligned, pieces[i]);
  }
}

__device__ __forceinline__ void move_origins(const exit_select_params& p, int count) {
  for (int i = blockIdx.x * kSelectThreads + threadIdx.x; i < count; i += gridDim.x * kSelectThreads)
    p.continue_origin[i] = p.origin[p.continue_rows[i]];
}

template <typename T>
__device__ __forceinline__ void exit_select(const exit_select_params& p) {
  const RowMatrix<const T> hidden{static_cast<const T*>(p.hidden), p.hidden_stride};
  const RowMatrix<const T> exits{static_cast<const T*>(p.exit_states), p.exit_stride};
  const int continuing = min(*p.continue_count, p.rows), exiting = min(*p.exit_count, p.rows);
  if (p.head_input)
    move_rows(exits, p.exit_rows, exiting, RowMatrix<T>{static_cast<T*>(p.head_input), p.head_stride}, p.hidden_size,
              [&](int i) { return p.origin ? p.origin[p.exit_rows[i]] : i; });
  if (p.continue_origin && p.origin && blockIdx.y == 0) move_origins(p, continuing);
  if (p.continue_hidden)
    move_rows(hidden, p.continue_rows, continuing, RowMatrix<T>{static_cast<T*>(p.continue_hidden), p.continue_stride},
              p.hidden_size, [](int i) { return i; });
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_select, exit_select_params, tide::kSelectThreads)
