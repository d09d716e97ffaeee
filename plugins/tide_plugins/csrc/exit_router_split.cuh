// The scores of exit_router in two launches, for callers that provide only inputs and outputs: without zeroed counters no block can
// detect that it is the last, so a second launch does the reduction.
//
//   project   hidden [N, H] T, down [R, H] T → partial [groups · chunks · 8 · (pitch + 2)] float32       grid (chunks, slices, groups)
//   score     partial, down_bias [R], up [R], up_bias [1] → score [N] float32                             grid (chunks, 1, groups)
//
// groups = ceil(N / 8), chunks = ceil(H / chunk), slices = ceil(R / 16), pitch = 16 · slices. RMSNorm only. Formula and order
// of sums are exit_router's. Arguments are plain scalars and pointers, inputs first and outputs last, as TensorRT passes them to an
// ahead-of-time plugin (tide_plugins/trt/aot.py).
#pragma once

#include "dynamic_shared.cuh"
#include "element.cuh"
#include "project_group.cuh"
#include "router_score.cuh"

namespace tide {

template <typename T>
__device__ __forceinline__ void exit_router_project(const T* hidden, const T* down, int rows, int hidden_size, int width, int chunk,
                                                    float* partial) {
  const GroupWorkspace group(partial, kGroupRows, gridDim.y * kSliceWidth);
  project_group<T>({{hidden, hidden_size, nullptr}, down, rows, hidden_size, width, chunk, false, partial}, group);
}

// Dynamic shared memory: 8 · pitch floats.
template <typename T>
__device__ __forceinline__ void exit_router_score(const T* hidden, const float* partial, const float* down_bias, const float* up,
                                                  const float* up_bias, int rows, int hidden_size, int width, float epsilon,
                                                  float* score) {
  if (blockIdx.x > 0) return;  // the grid equals the first launch's, which defines the layout of `partial`
  const GroupWorkspace group(const_cast<float*>(partial), kGroupRows, int(round_up(width, kSliceWidth)));
  const DownProjection<T> projection{{hidden, hidden_size, nullptr}, nullptr, rows, hidden_size, width, 0, false, nullptr};
  const RouterWeights weights{nullptr, down_bias, up, up_bias, width};
  finish_rows<kGroupRows>(projection, group, epsilon, dynamic_shared<float>(),
                          [&](int row, const RowNorm& norm, const float* products) {
                            const float value = router_score(weights, norm, products);
                            if (threadIdx.x % 32 == 0) score[row] = value;
                          });
}

}  // namespace tide

// epsilon is passed as the bits of a float, because scalars of a plugin are integers.
#define TIDE_SPLIT_ENTRY_POINTS(suffix, T)                                                                                    \
  extern "C" __global__ void __launch_bounds__(tide::kGroupThreads, 1)                                                        \
      tide_exit_router_project_##suffix(const T* hidden, const T* down, int rows, int hidden_size, int width, int chunk,      \
                                        float* partial) {                                                                     \
    tide::exit_router_project<T>(hidden, down, rows, hidden_size, width, chunk, partial);                                     \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(tide::kGroupThreads, 1)                                                        \
      tide_exit_router_score_##suffix(const T* hidden, const float* partial, const float* down_bias, const float* up,         \
                                      const float* up_bias, int rows, int hidden_size, int width, int epsilon, float* score) { \
    tide::exit_router_score<T>(hidden, partial, down_bias, up, up_bias, rows, hidden_size, width, __int_as_float(epsilon), score); \
  }
TIDE_SPLIT_ENTRY_POINTS(f32, float)
TIDE_SPLIT_ENTRY_POINTS(f16, __half)
TIDE_SPLIT_ENTRY_POINTS(bf16, __nv_bfloat16)
