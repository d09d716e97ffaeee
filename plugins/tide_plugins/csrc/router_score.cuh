// The score of a row from its products with `down`: sigmoid(up · silu(down · n + down_bias) + up_bias).
#pragma once

#include "row_norm.cuh"

namespace tide {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct RouterWeights {
  const float* down_sum;  // null: RMSNorm
  const float* down_bias;
  const float* up;
  const float* up_bias;
  int width;
};

// Computed by a warp; every lane gets the result.
__device__ __forceinline__ float router_score(const RouterWeights& weights, const RowNorm& norm, const float* products) {
  float total = 0.0f;
  for (int r = threadIdx.x % 32; r < weights.width; r += 32) {
    const float x = norm.projected(products[r], weights.down_sum, r) + weights.down_bias[r];
    total += x * sigmoid(x) * weights.up[r];
  }
  return sigmoid(warp_sum(total) + *weights.up_bias);
}

}  // namespace tide
