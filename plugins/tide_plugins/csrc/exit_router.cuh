// exit_router: the scores of an exit's MLP router (`MlpRouter` of tide_export/graphs/exit_modules.py), in two launches.
//
//   n     = hidden / sqrt(mean(hidden²) + epsilon)            RMSNorm without weight (Zhang & Sennrich 2019, arXiv:1910.07467)
//   score = sigmoid(up · silu(down · n + down_bias) + up_bias)
//
//   project   hidden [N, H] T, down [R, H] float32 → partial                            grid (chunks, slices, groups)
//   score     partial, down_bias [R], up [R], up_bias [1] float32 → score [N] float32   grid (groups), 8 · pitch floats shared
//
//   partial = products [groups, chunks, 8, pitch], then squares [groups, chunks, 8]     float32
//   groups = ceil(N / 8), chunks = ceil(H / chunk) <= 32, slices = ceil(R / 16), pitch = 16 · slices
//
// States are projected first and normalized afterwards, so they are read once. The first launch is bound by reading `down`:
// slices and chunks distribute it over the whole GPU. The weights are float32 for every type of states, as in training. A second
// launch adds the chunks, because a caller such as TensorRT gives a kernel no zeroed counters, by which a block would know that it
// is the last. Arguments are scalars and pointers, inputs first and outputs last, as TensorRT passes them to an ahead-of-time
// plugin (tide_plugins/trt/aot.py), and epsilon is the bits of a float, because a plugin's scalars are integers. The order of
// all sums depends on `chunk` alone: the same plan gives the same bits.
#pragma once

#include "dynamic_shared.cuh"
#include "row_piece.cuh"
#include "warp_sum.cuh"

namespace tide {

constexpr int kGroupRows = 8;
constexpr int kGroupThreads = 256;  // a warp for each row of a group
constexpr int kSliceWidth = 16;
constexpr int kWarpColumns = kSliceWidth / kGroupRows;

// Layout of `partial`.
struct RouterPartial {
  int chunks, pitch;
  const float *products, *squares;

  __device__ RouterPartial(const float* partial, int rows, int hidden_size, int width, int chunk)
      : chunks((hidden_size + chunk - 1) / chunk), pitch((width + kSliceWidth - 1) / kSliceWidth * kSliceWidth), products(partial) {
    squares = partial + int64_t(rows + kGroupRows - 1) / kGroupRows * chunks * kGroupRows * pitch;
  }
  __device__ int64_t row(int group, int chunk, int row) const { return (int64_t(group) * chunks + chunk) * kGroupRows + row; }
};

template <typename T>
__device__ __forceinline__ void exit_router_project(const T* hidden, const float* down, int rows, int hidden_size, int width, int chunk,
                                                    float* partial) {
  constexpr int kSize = Piece<T>::kSize;
  const RouterPartial layout(partial, rows, hidden_size, width, chunk);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.z * kGroupRows, live = min(rows - first, kGroupRows);
  const int column = blockIdx.y * kSliceWidth + warp * kWarpColumns;
  const int end = min(int(blockIdx.x + 1) * chunk, hidden_size);
  const bool states_aligned = rows_aligned<T>(hidden, hidden_size), down_aligned = rows_aligned<float>(down, hidden_size);
  const bool measures = blockIdx.y == 0 && warp < live;  // warp w of the first slice also leaves row w's squares
  float products[kWarpColumns * kGroupRows] = {}, squares = 0.0f;

  for (int at = blockIdx.x * chunk + lane * kSize; at < end; at += 32 * kSize) {
    float weights[kWarpColumns][kSize];
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
      load_row(down + int64_t(column + c) * hidden_size, at, column + c < width ? hidden_size : 0, down_aligned, weights[c]);
#pragma unroll
    for (int row = 0; row < kGroupRows; ++row) {
      if (row >= live) continue;  // not break: the sums stay in registers only when the loop unrolls
      float states[kSize];
      load_row(hidden + int64_t(first + row) * hidden_size, at, hidden_size, states_aligned, states);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (measures && row == warp) squares += states[i] * states[i];
#pragma unroll
        for (int c = 0; c < kWarpColumns; ++c) products[c * kGroupRows + row] += weights[c][i] * states[i];
      }
    }
  }

  const float product = transposed_sum<kWarpColumns * kGroupRows, 32>(products);
  const int row = lane / 2 % kGroupRows, c = lane / 2 / kGroupRows;
  if (lane % 2 == 0 && row < live) partial[layout.row(blockIdx.z, blockIdx.x, row) * layout.pitch + column + c] = product;
  squares = warp_sum(squares);
  if (measures && lane == 0) partial[layout.squares - partial + layout.row(blockIdx.z, blockIdx.x, warp)] = squares;
}

// Products of the group's live rows, over all chunks: [live, pitch] in shared memory. Ends synchronized.
__device__ __forceinline__ void sum_chunks(const RouterPartial& layout, int group, int live, float* sums) {
  const float4* parts = reinterpret_cast<const float4*>(layout.products + layout.row(group, 0, 0) * layout.pitch);
  const int stride = kGroupRows * layout.pitch / 4;
  for (int i = threadIdx.x; i < live * layout.pitch / 4; i += blockDim.x) {
    float4 total = parts[i];
#pragma unroll 8
    for (int chunk = 1; chunk < layout.chunks; ++chunk) {
      const float4 part = parts[int64_t(chunk) * stride + i];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    reinterpret_cast<float4*>(sums)[i] = total;
  }
  __syncthreads();
}

// 1 / root mean square of a row, computed by a warp; NaN when its squares overflow float32: such a row has no score.
__device__ __forceinline__ float norm_scale(const RouterPartial& layout, int group, int row, int hidden_size, float epsilon) {
  const int chunk = threadIdx.x % 32;
  const float squares = warp_sum(chunk < layout.chunks ? layout.squares[layout.row(group, chunk, row)] : 0.0f);
  return squares <= 3.402823466e38f ? 1.0f / sqrtf(squares / hidden_size + epsilon) : nanf("");
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ void exit_router_score(const float* partial, const float* down_bias, const float* up, const float* up_bias,
                                                  int rows, int hidden_size, int width, int chunk, float epsilon, float* score) {
  const RouterPartial layout(partial, rows, hidden_size, width, chunk);
  const int group = blockIdx.x, live = min(rows - group * kGroupRows, kGroupRows), row = threadIdx.x / 32;
  float* sums = dynamic_shared<float>();
  sum_chunks(layout, group, live, sums);
  if (row >= live) return;
  const float scale = norm_scale(layout, group, row, hidden_size, epsilon);
  float total = 0.0f;
  for (int r = threadIdx.x % 32; r < width; r += 32) {
    const float x = scale * sums[row * layout.pitch + r] + down_bias[r];
    total += x * sigmoid(x) * up[r];
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) score[group * kGroupRows + row] = sigmoid(total + *up_bias);
}

}  // namespace tide

#define TIDE_ROUTER_ENTRY_POINTS(suffix, T)                                                                                       \
  extern "C" __global__ void __launch_bounds__(tide::kGroupThreads, 1)                                                            \
      tide_exit_router_project_##suffix(const T* hidden, const float* down, int rows, int hidden_size, int width, int chunk,      \
                                        float* partial) {                                                                         \
    tide::exit_router_project<T>(hidden, down, rows, hidden_size, width, chunk, partial);                                         \
  }                                                                                                                               \
  extern "C" __global__ void __launch_bounds__(tide::kGroupThreads, 1)                                                            \
      tide_exit_router_score_##suffix(const T* /* a plugin's, for its shape */, const float* partial, const float* down_bias,     \
                                      const float* up, const float* up_bias, int rows, int hidden_size, int width, int chunk,     \
                                      int epsilon, float* score) {                                                                \
    tide::exit_router_score(partial, down_bias, up, up_bias, rows, hidden_size, width, chunk, __int_as_float(epsilon), score);    \
  }
TIDE_ROUTER_ENTRY_POINTS(f32, float)
TIDE_ROUTER_ENTRY_POINTS(f16, __half)
TIDE_ROUTER_ENTRY_POINTS(bf16, __nv_bfloat16)
