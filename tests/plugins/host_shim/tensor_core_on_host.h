// The tensor core instructions of csrc/tensor_core.cuh on the host: layouts of fragments as the PTX ISA specifies them, and its rules of
// alignment. TIDE_TENSOR_CORES selects them: 75 and more `ldmatrix` and `mma`, 70 `wmma`.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/: "Matrix Fragments for mma.m16n8k16", "ldmatrix", and for `wmma` "Matrix
// Storage": rows aligned to the size of a fragment.
#pragma once

#include "tensor_core.cuh"

namespace host {

inline int misaligned = 0;  // accesses that a GPU may refuse

inline void require_aligned(const void* pointer, int64_t bytes) { misaligned += reinterpret_cast<uint64_t>(pointer) % bytes != 0; }

inline float widened(__half x) { return __half2float(x); }
inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
void widen_pair(uint32_t bits, float* to) {
  T pair[2];
  std::memcpy(pair, &bits, sizeof pair);
  to[0] = widened(pair[0]), to[1] = widened(pair[1]);
}

// Operands of one instruction, which its lanes write before any reads them. Two alternating tables suffice, as lanes are at most one
// instruction ahead.
struct Operands {
  float left[16][16], right[16][16];  // right: transposed, 8 rows for `mma`
};
inline Operands operands[16][2];

inline Operands& next_operands() {
  static thread_local unsigned turns[16][32] = {};
  const int warp = Block::active()->current().number / 32;
  return operands[warp][turns[warp][lane()]++ % 2];
}

}  // namespace host

namespace tide {

#if TIDE_TENSOR_CORES >= 75
inline void load_matrices(uint32_t (&matrices)[4], const void* row) {
  host::require_aligned(row, 16);
  const uint64_t* rows = host::exchange(row);
  const int lane = host::lane();
  for (int i = 0; i < 4; ++i) std::memcpy(&matrices[i], host::lane_value<const char*>(rows[8 * i + lane / 4]) + lane % 4 * 4, 4);
}

template <typename T>
void add_product(float (&sums)[4], const uint32_t (&left)[4], uint32_t right_0, uint32_t right_1) {
  host::Operands& given = host::next_operands();
  const int row = host::lane() / 4, column = host::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) host::widen_pair<T>(left[i], &given.left[row + i % 2 * 8][column + i / 2 * 8]);
  host::widen_pair<T>(right_0, &given.right[row][column]);
  host::widen_pair<T>(right_1, &given.right[row][column + 8]);
  host::Block::active()->sync_warp();
  for (int i = 0; i < 4; ++i) {
    const float *a = given.left[row + i / 2 * 8], *b = given.right[column + i % 2];
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum += a[k] * b[k];
    sums[i] += sum;
  }
}
#elif TIDE_TENSOR_CORES == 70
// Here lane l holds half of row l / 2 of a factor, and of the sums.
inline void load_rows(WmmaRows& rows, const __half* from, int pitch) {
  host::require_aligned(from, 32);
  host::require_aligned(from + pitch, 32);
  std::memcpy(rows.lane, from + host::lane() / 2 * pitch + host::lane() % 2 * 8, 16);
}
inline void wmma_load_left(WmmaRows& rows, const __half* from, int pitch) { load_rows(rows, from, pitch); }
inline void wmma_load_right(WmmaRows& rows, const __half* from, int pitch) { load_rows(rows, from, pitch); }

inline void wmma_add_product(WmmaSums& sums, const WmmaRows& left, const WmmaRows& right) {
  host::Operands& given = host::next_operands();
  const int row = host::lane() / 2, column = host::lane() % 2 * 8;
  for (int i = 0; i < 4; ++i) {
    host::widen_pair<__half>(left.lane[i], &given.left[row][column + 2 * i]);
    host::widen_pair<__half>(right.lane[i], &given.right[row][column + 2 * i]);
  }
  host::Block::active()->sync_warp();
  for (int i = 0; i < 8; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) sum += given.left[row][k] * given.right[column + i][k];
    sums.lane[i] += sum;
  }
}

inline void wmma_store(float* out, int pitch, const WmmaSums& sums) {
  host::require_aligned(out, 32);
  host::require_aligned(out + pitch, 32);
  std::memcpy(out + host::lane() / 2 * pitch + host::lane() % 2 * 8, sums.lane, 32);
}
#endif

}  // namespace tide
