// A group of up to 8 rows times a slice of `down`, over one chunk of H, for decoding, which is bound by reading `down` once. Slices
// and chunks distribute it over the whole GPU; a warp processes two rows of `down`, a lane 16 bytes of each.
#pragma once

#include "down_projection.cuh"
#include "warp_sum.cuh"

namespace tide {

constexpr int kWarpColumns = kSliceWidth / (kGroupThreads / 32);

// One row's sum and sum of squares of h - shift over this lane's piece; elements after the end of the row are skipped.
template <int kSize>
__device__ __forceinline__ void add_moments(const float (&states)[kSize], int left, float shift, float& sum, float& squares) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float state = i < left ? states[i] - shift : 0.0f;
    sum += state;
    squares += state * state;
  }
}

// grid (chunks, slices, groups), kGroupThreads threads. Warp w of the first slice also leaves row w's moments.
template <typename T>
__device__ __forceinline__ void project_group(const DownProjection<T>& p, const GroupWorkspace& group) {
  constexpr int kSize = Piece<T>::kSize;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = blockIdx.z * kGroupRows, rows = min(p.live - begin, kGroupRows);
  const int column = blockIdx.y * kSliceWidth + warp * kWarpColumns;
  const int end = min(int(blockIdx.x + 1) * p.chunk, p.hidden_size);
  const bool states_aligned = rows_aligned<T>(p.rows.base, p.rows.stride), down_aligned = rows_aligned<T>(p.down, p.hidden_size);
  const bool measures = blockIdx.y == 0 && warp < rows;
  const float shift = measures && p.centred ? to_float(p.rows[begin + warp][0]) : 0.0f;
  float products[kWarpColumns * kGroupRows] = {}, sum = 0.0f, squares = 0.0f;

  for (int at = blockIdx.x * p.chunk + lane * kSize; at < end; at += 32 * kSize) {
    float weights[kWarpColumns][kSize];
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
      widen(load_piece(p.down + int64_t(column + c) * p.hidden_size, at, column + c < p.width ? p.hidden_size : 0, down_aligned),
            weights[c]);
#pragma unroll
    for (int row = 0; row < kGroupRows; ++row) {
      if (row >= rows) continue;  // not break: the sums stay in registers only when the loop unrolls
      float states[kSize];
      widen(load_piece(p.rows[begin + row], at, p.hidden_size, states_aligned), states);
      if (measures && row == warp) add_moments(states, end - at, shift, sum, squares);
#pragma unroll
      for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
        for (int i = 0; i < kSize; ++i) products[c * kGroupRows + row] += weights[c][i] * states[i];
    }
  }

  const float product = transposed_sum<kWarpColumns * kGroupRows, 32>(products);
  const int row = lane / 2 % kGroupRows, c = lane / 2 / kGroupRows;
  if (lane % 2 == 0 && row < rows) group.product(blockIdx.x, row)[column + c] = product;
  sum = warp_sum(sum);
  squares = warp_sum(squares);
  if (measures && lane == 0) group.moment(blockIdx.x, warp)[0] = sum, group.moment(blockIdx.x, warp)[1] = squares;
}

}  // namespace tide
