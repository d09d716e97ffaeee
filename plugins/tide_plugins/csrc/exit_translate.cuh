// exit_translate: the low-rank exit head, from listed rows of hidden into the head's input.
//
//   hidden [*, H] T, down [K, H] T, up [H, K] T, K <= 128 → out [*, H] T
//
//   out = h + up · (down · norm(h))             norm without weight, as in exit_router.cuh
//
// The tuned lens (Belrose et al. 2023, arXiv:2303.08112, equation 8) with a low-rank matrix:
// tide_calibrate/exit_heads/translator.py.
//
// Two launches, because every element of `up · code` needs the whole code, and a last block alone would read `up` with one
// multiprocessor. exit_translate_down writes the normalized code [N, K] in float32, exit_translate_up adds `up · code` to the rows.
// Rows are processed in groups of 8, because few tokens exit in a decode step; in a long prefill, `down` and `up` are read from L2
// per group.
#pragma once

#include "dynamic_shared.cuh"
#include "entry_points.cuh"
#include "exit_translate_plan.h"
#include "last_block.cuh"
#include "project_group.cuh"

namespace tide {

template <typename T>
__device__ __forceinline__ DownProjection<T> translator_projection(const exit_translate_params& p) {
  const int live = p.row_count ? min(*p.row_count, p.rows) : p.rows;
  return {{static_cast<const T*>(p.hidden), p.row_stride, p.row_list},
          static_cast<const T*>(p.down),
          live,
          p.hidden_size,
          p.rank,
          p.chunk,
          p.down_sum != nullptr,
          p.workspace};
}

template <typename T>
__device__ __forceinline__ void exit_translate_down(const exit_translate_params& p) {
  const DownProjection<T> projection = translator_projection<T>(p);
  const GroupWorkspace group(p.workspace, kGroupRows, gridDim.y * kSliceWidth);
  project_group(projection, group);
  if (!last_block(p.counters + blockIdx.z, gridDim.x * gridDim.y)) return;
  finish_rows<kGroupRows>(projection, group, p.epsilon, dynamic_shared<float>(),
                          [&](int item, const RowNorm& norm, const float* products) {
                            for (int k = threadIdx.x % 32; k < p.rank; k += 32)
                              p.code[int64_t(item) * p.rank + k] = norm.projected(products[k], p.down_sum, k);
                          });
}

// codes [kGroupRows, kMaxRank] in shared memory, zeros where there is no row or no rank. Ends synchronised.
__device__ __forceinline__ void load_codes(const exit_translate_params& p, int begin, int rows, float* codes) {
  for (int i = threadIdx.x; i < kGroupRows * kMaxRank; i += kUpThreads) {
    const int row = i / kMaxRank, k = i % kMaxRank;
    codes[i] = row < rows && k < p.rank ? p.code[int64_t(begin + row) * p.rank + k] : 0.0f;
  }
  __syncthreads();
}

// grid (columns of out, groups). Eight lanes share a row of `up` and hold one sum for each row of the group.
template <typename T>
__device__ __forceinline__ void exit_translate_up(const exit_translate_params& p) {
  constexpr int kSize = Piece<T>::kSize;
  __shared__ float codes[kGroupRows * kMaxRank];
  const DownProjection<T> projection = translator_projection<T>(p);
  const int begin = blockIdx.y * kGroupRows, rows = min(projection.live - begin, kGroupRows);
  if (rows <= 0) return;
  load_codes(p, begin, rows, codes);
  const int lane = threadIdx.x % kUpLanes, column = blockIdx.x * kUpColumns + threadIdx.x / kUpLanes;
  const T* up = static_cast<const T*>(p.up) + int64_t(column) * p.rank;
  const bool aligned = rows_aligned<T>(p.up, p.rank);
  float sums[kGroupRows] = {};
  for (int k = lane * kSize; k < p.rank; k += kUpLanes * kSize) {
    float weights[kSize];
    widen(load_piece(up, k, column < p.hidden_size ? p.rank : 0, aligned), weights);
#pragma unroll
    for (int row = 0; row < kGroupRows; ++row)
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[row] += weights[i] * codes[row * kMaxRank + k + i];
  }
  const float sum = transposed_sum<kGroupRows, kUpLanes>(sums);
  if (lane >= rows || column >= p.hidden_size) return;
  const int64_t row = projection.rows.place(begin + lane), place = p.origin ? p.origin[row] : begin + lane;
  const float state = to_float(projection.rows.base[row * p.row_stride + column]);
  static_cast<T*>(p.out)[place * p.out_stride + column] = from_float<T>(state + sum);
}

}  // namespace tide

TIDE_ENTRY_POINTS(exit_translate_down, exit_translate_params, tide::kGroupThreads)
TIDE_ENTRY_POINTS(exit_translate_up, exit_translate_params, tide::kUpThreads)
