// A tile of 128 rows times all of `down`, over one chunk of H, for prefill. Stages of 64 bytes a row stream through shared
// memory, two being copied while a third (width > 128: one while a second) is multiplied.
#pragma once

#include "async_copy.cuh"
#include "down_projection.cuh"
#include "dynamic_shared.cuh"
#include "warp_tile.cuh"

namespace tide {

template <typename T>
constexpr int kStageDepth = kStageBytes / int(sizeof(T));
template <typename T>
constexpr int kSharedPitch = kStagePitch / int(sizeof(T));

// The block's pieces of one stage: rows of the tile, then rows of `down`; zeros elsewhere.
template <typename T>
__device__ __forceinline__ void load_stage(const DownProjection<T>& p, T* stage, int at, int pitch) {
  constexpr int kSize = Piece<T>::kSize, kPieces = kStageDepth<T> / kSize;
  const int first = blockIdx.z * kTileRows;
  const bool states_aligned = rows_aligned<T>(p.rows.base, p.rows.stride), down_aligned = rows_aligned<T>(p.down, p.hidden_size);
  for (int i = threadIdx.x; i < (kTileRows + pitch) * kPieces; i += blockDim.x) {
    const int line = i / kPieces, column = i % kPieces * kSize;
    const bool of_states = line < kTileRows;
    const int row = of_states ? first + line : line - kTileRows;
    const bool exists = row < (of_states ? p.live : p.width), aligned = of_states ? states_aligned : down_aligned;
    T* target = stage + line * kSharedPitch<T> + column;
    const T* source = !exists ? p.down : of_states ? p.rows[row] : p.down + int64_t(row) * p.hidden_size;
    if (exists && aligned && at + column + kSize <= p.hidden_size)
      copy_16_bytes(target, source + at + column);
    else
      *reinterpret_cast<Piece<T>*>(target) = load_piece(source, at + column, exists ? p.hidden_size : 0, false);
  }
}

// Thread t adds up row t of the tile.
template <typename T>
__device__ __forceinline__ void add_stage_moments(const T* row, int left, float shift, float& sum, float& squares) {
#pragma unroll
  for (int k = 0; k < kStageDepth<T>; k += Piece<T>::kSize) {
    const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(row + k);
#pragma unroll
    for (int i = 0; i < Piece<T>::kSize; ++i) {
      const float state = k + i < left ? to_float(piece.elements[i]) - shift : 0.0f;
      sum += state;
      squares += state * state;
    }
  }
}

// grid (chunks, 1, tiles), 128 threads for each 64 of width; shared memory for kStages stages.
template <int kStages, typename T>
__device__ __forceinline__ void project_tile(const DownProjection<T>& p, const GroupWorkspace& tile) {
  T* stages = dynamic_shared<T>();
  const int stage_size = (kTileRows + tile.pitch) * kSharedPitch<T>, warp = threadIdx.x / 32;
  const int begin = blockIdx.x * p.chunk, end = min(begin + p.chunk, p.hidden_size);
  const int count = int(divide_up(end - begin, kStageDepth<T>));
  const int row = (warp % (kTileRows / kWarpRows)) * kWarpRows, column = warp / (kTileRows / kWarpRows) * kWarpWidth;
  const int measured = blockIdx.z * kTileRows + threadIdx.x;
  const bool measures = threadIdx.x < kTileRows && measured < p.live;
  const float shift = measures && p.centred ? to_float(p.rows[measured][0]) : 0.0f;
  float sum = 0.0f, squares = 0.0f;
  WarpTile<T> product;

#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < count) load_stage(p, stages + s * stage_size, begin + s * kStageDepth<T>, tile.pitch);
    commit_copies();
  }
  for (int s = 0; s < count; ++s) {
    wait_copies<kStages - 2>();
    __syncthreads();  // stage s is complete, and no thread still reads the stage that is overwritten next
    const int next = s + kStages - 1;
    if (next < count) load_stage(p, stages + next % kStages * stage_size, begin + next * kStageDepth<T>, tile.pitch);
    commit_copies();
    const T* stage = stages + s % kStages * stage_size;
    if (measures) add_stage_moments(stage + threadIdx.x * kSharedPitch<T>, end - begin - s * kStageDepth<T>, shift, sum, squares);
    product.add_product(stage + row * kSharedPitch<T>, stage + (kTileRows + column) * kSharedPitch<T>, kSharedPitch<T>,
                        kStageDepth<T>);
  }
  wait_copies<0>();
  product.store(tile.product(blockIdx.x, row) + column, tile.pitch);
  if (measures) tile.moment(blockIdx.x, threadIdx.x)[0] = sum, tile.moment(blockIdx.x, threadIdx.x)[1] = squares;
}

template <typename T>
__device__ __forceinline__ void project_tile(const DownProjection<T>& p, const GroupWorkspace& tile) {
  if (tile_stages(tile.pitch) == 3)
    project_tile<3>(p, tile);
  else
    project_tile<2>(p, tile);
}

}  // namespace tide
