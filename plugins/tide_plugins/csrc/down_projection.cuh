// hidden [rows, H] · down [width, H]^T, split over blocks: layout of partial sums in the workspace, and their reduction.
#pragma once

#include "down_projection_plan.h"
#include "row_norm.cuh"
#include "row_piece.cuh"

namespace tide {

// Rows of a matrix, selected by a list or consecutive.
template <typename T>
struct Rows {
  const T* base;
  int64_t stride;
  const int32_t* list;

  __device__ int64_t place(int item) const { return list ? list[item] : item; }
  __device__ const T* operator[](int item) const { return base + place(item) * stride; }
};

template <typename T>
struct DownProjection {
  Rows<T> rows;
  const T* down;  // [width, hidden_size]
  int live;       // number of valid rows
  int hidden_size, width, chunk;
  bool centred;  // LayerNorm
  float* workspace;
};

// Workspace of one group of rows: grid (chunks, slices, groups).
struct GroupWorkspace {
  float* products;  // [chunks, group_rows, pitch]
  float* moments;   // [chunks, group_rows, 2]
  int chunks, group_rows, pitch;

  __device__ GroupWorkspace(float* workspace, int group_rows, int pitch)
      : chunks(gridDim.x), group_rows(group_rows), pitch(pitch) {
    const int64_t group = int64_t(chunks) * group_rows;
    products = workspace + blockIdx.z * group * pitch;
    moments = workspace + gridDim.z * group * pitch + blockIdx.z * group * 2;
  }
  __device__ float* product(int chunk, int row) const { return products + (int64_t(chunk) * group_rows + row) * pitch; }
  __device__ float* moment(int chunk, int row) const { return moments + (int64_t(chunk) * group_rows + row) * 2; }
};

// Products of rows first … first + rows of the group, over all chunks: [rows, pitch] in shared memory. Ends synchronised.
__device__ __forceinline__ void sum_chunks(const GroupWorkspace& group, int first, int rows, float* sums) {
  const float4* parts = reinterpret_cast<const float4*>(group.product(0, first));
  const int64_t stride = int64_t(group.group_rows) * group.pitch / 4;
  __syncthreads();  // `sums` is no longer read
  for (int i = threadIdx.x; i < rows * group.pitch / 4; i += blockDim.x) {
    float4 total = __ldcg(parts + i);
#pragma unroll 8
    for (int chunk = 1; chunk < group.chunks; ++chunk) {
      const float4 part = __ldcg(parts + chunk * stride + i);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    reinterpret_cast<float4*>(sums)[i] = total;
  }
  __syncthreads();
}

// Calls finish(item, norm, products [width]) for every live row of the group, by one warp each; kBatch rows at a time fit `sums`.
template <int kBatch, typename T, typename Finish>
__device__ __forceinline__ void finish_rows(const DownProjection<T>& p, const GroupWorkspace& group, float epsilon, float* sums,
                                            Finish finish) {
  const int begin = blockIdx.z * group.group_rows, live = min(p.live - begin, group.group_rows);
  for (int first = 0; first < live; first += kBatch) {
    const int rows = min(kBatch, live - first);
    sum_chunks(group, first, rows, sums);
    for (int i = threadIdx.x / 32; i < rows; i += blockDim.x / 32) {
      const int item = begin + first + i;
      const float shift = p.centred ? to_float(p.rows[item][0]) : 0.0f;
      const RowNorm norm = row_norm(group.moment(0, first + i), group.chunks, int64_t(group.group_rows) * 2, p.hidden_size, shift,
                                    p.centred, epsilon);
      finish(item, norm, sums + i * group.pitch);
    }
  }
}

}  // namespace tide
