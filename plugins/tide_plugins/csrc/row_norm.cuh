// A norm without weight, applied to a row's projection after the row has been read once:
//
//   RMSNorm    down · n =  down·h / sqrt(mean(h²) + ε)                             (Zhang & Sennrich 2019, arXiv:1910.07467)
//   LayerNorm  down · n = (down·h - mean(h) · down_sum) / sqrt(var(h) + ε)         (Ba et al. 2016, arXiv:1607.06450)
//
// so states are projected first and normalized afterwards. For LayerNorm the moments are those of h - h[0]: the variance of a
// row whose mean is large does not cancel away. The projection of such a row does lose log2(mean / deviation) bits of float32.
#pragma once

#include "portable.h"
#include "warp_sum.cuh"

namespace tide {

struct RowNorm {
  float mean;   // 0 for RMSNorm
  float scale;  // NaN when the squares overflow float32: such a row has no score

  __device__ float projected(float product, const float* down_sum, int column) const {
    return scale * (down_sum ? product - mean * down_sum[column] : product);
  }
};

// From a row's moments (sum and sum of squares of h - shift) in each of `chunks` <= 32 chunks, `stride` floats apart; by a warp.
__device__ __forceinline__ RowNorm row_norm(const float* moments, int chunks, int64_t stride, int hidden_size, float shift,
                                            bool centred, float epsilon) {
  const int lane = threadIdx.x % 32;
  const float sum = warp_sum(lane < chunks ? __ldcg(moments + lane * stride) : 0.0f);
  const float squares = warp_sum(lane < chunks ? __ldcg(moments + lane * stride + 1) : 0.0f);
  const float offset = centred ? sum / hidden_size : 0.0f;
  const float mean_square = fmaxf(squares / hidden_size - offset * offset, 0.0f);
  const bool finite = squares <= 3.402823466e38f;
  return {centred ? shift + offset : 0.0f, finite ? 1.0f / sqrtf(mean_square + epsilon) : nanf("")};
}

}  // namespace tide
