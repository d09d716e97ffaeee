// A tile of 128 or 32 rows times all of `down`, over one chunk of H, for prefill. Stages of 64 bytes a row stream through a ring in
// shared memory: one is multiplied while the others are copied.
#pragma once

#include "async_copy.cuh"
#include "down_projection.cuh"
#include "dynamic_shared.cuh"
#include "warp_sum.cuh"
#include "warp_tile.cuh"

namespace tide {

// The block's pieces of one stage: rows of the tile, then rows of `down`; zeros elsewhere.
template <int kRows, typename T>
__device__ __forceinline__ void load_stage(const DownProjection<T>& p, T* stage, int at, int pitch) {
  constexpr int kSize = Piece<T>::kSize;
  const int first = blockIdx.z * kRows;
  const bool states_aligned = rows_aligned<T>(p.rows.base, p.rows.stride), down_aligned = rows_aligned<T>(p.down, p.hidden_size);
  for (int i = threadIdx.x; i < (kRows + pitch) * kStagePieces; i += blockDim.x) {
    const int line = i / kStagePieces, piece = i % kStagePieces, column = at + piece * kSize;
    const bool of_states = line < kRows;
    const int row = of_states ? first + line : line - kRows;
    const bool exists = row < (of_states ? p.live : p.width), aligned = of_states ? states_aligned : down_aligned;
    T* target = stage + piece_offset<T>(line, piece);
    const T* source = !exists ? p.down : of_states ? p.rows[row] : p.down + int64_t(row) * p.hidden_size;
    if (exists && aligned && column + kSize <= p.hidden_size)
      copy_16_bytes(target, source + column);
    else
      *reinterpret_cast<Piece<T>*>(target) = load_piece(source, column, exists ? p.hidden_size : 0, false);
  }
}

// Moments of the tile's rows. kLanes threads share a row, each a part of its pieces.
template <int kRows, typename T>
class TileMoments {
  static constexpr int kThreads = 128, kLanes = kThreads / kRows;

 public:
  __device__ __forceinline__ TileMoments(const DownProjection<T>& p) : line_(threadIdx.x / kLanes) {
    const int row = blockIdx.z * kRows + line_;
    measures_ = threadIdx.x < kThreads && row < p.live;
    shift_ = measures_ && p.centred ? to_float(p.rows[row][0]) : 0.0f;
  }

  // `left`: elements of the chunk from this stage on.
  __device__ __forceinline__ void add_stage(const T* stage, int left) {
    if (!measures_) return;
#pragma unroll
    for (int i = 0; i < kStagePieces / kLanes; ++i) {
      const int piece = threadIdx.x % kLanes + i * kLanes;
      const Piece<T> elements = *reinterpret_cast<const Piece<T>*>(stage + piece_offset<T>(line_, piece));
#pragma unroll
      for (int k = 0; k < Piece<T>::kSize; ++k) {
        const float state = piece * Piece<T>::kSize + k < left ? to_float(elements.elements[k]) - shift_ : 0.0f;
        sum_ += state;
        squares_ += state * state;
      }
    }
  }

  // Called by whole warps.
  __device__ __forceinline__ void store(const GroupWorkspace& tile) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum_ += __shfl_xor_sync(kAllLanes, sum_, offset);
      squares_ += __shfl_xor_sync(kAllLanes, squares_, offset);
    }
    if (!measures_ || threadIdx.x % kLanes != 0) return;
    float* moment = tile.moment(blockIdx.x, line_);
    moment[0] = sum_, moment[1] = squares_;
  }

 private:
  int line_;
  bool measures_;
  float shift_, sum_ = 0.0f, squares_ = 0.0f;
};

// grid (chunks, 1, tiles), 128 threads for each 64 of width. A warp multiplies 32 rows by kWidth columns.
template <int kRows, int kWidth, typename T>
__device__ __forceinline__ void project_tile(const DownProjection<T>& p, const GroupWorkspace& tile) {
  constexpr int kWarpsDown = kRows / kWarpRows;
  T* ring = dynamic_shared<T>();
  const int stages = tile_stages(kRows, tile.pitch), stage_size = (kRows + tile.pitch) * kStageDepth<T>, warp = threadIdx.x / 32;
  const int begin = blockIdx.x * p.chunk, end = min(begin + p.chunk, p.hidden_size);
  const int count = int(divide_up(end - begin, kStageDepth<T>));
  const int row = warp % kWarpsDown * kWarpRows, column = warp / kWarpsDown * kWidth;
  TileMoments<kRows, T> moments(p);
  WarpTile<T, kWidth> product;

  for (int s = 0; s < stages - 1; ++s) {
    if (s < count) load_stage<kRows>(p, ring + s * stage_size, begin + s * kStageDepth<T>, tile.pitch);
    commit_copies();
  }
  for (int s = 0; s < count; ++s) {
    wait_copies(stages - 2);
    __syncthreads();  // stage s is complete, and no thread still reads the stage that is overwritten next
    const int next = s + stages - 1;
    if (next < count) load_stage<kRows>(p, ring + next % stages * stage_size, begin + next * kStageDepth<T>, tile.pitch);
    commit_copies();
    const T* stage = ring + s % stages * stage_size;
    moments.add_stage(stage, end - begin - s * kStageDepth<T>);
    product.add_stage(stage, row, kRows + column);
  }
  wait_copies(0);
  product.store(tile.product(blockIdx.x, row) + column, tile.pitch);
  moments.store(tile);
}

}  // namespace tide
