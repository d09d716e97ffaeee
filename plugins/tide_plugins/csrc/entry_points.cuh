// One extern "C" kernel per element type, so that a cubin holds plain names: tide_exit_router_f32, _f16, _bf16.
#pragma once

#include "element.cuh"

#define TIDE_ENTRY_POINT(kernel, suffix, T, params, threads) \
  extern "C" __global__ void __launch_bounds__(threads, 1) tide_##kernel##_##suffix(tide::params p) { tide::kernel<T>(p); }
#define TIDE_ENTRY_POINTS(kernel, params, threads)       \
  TIDE_ENTRY_POINT(kernel, f32, float, params, threads)  \
  TIDE_ENTRY_POINT(kernel, f16, __half, params, threads) \
  TIDE_ENTRY_POINT(kernel, bf16, __nv_bfloat16, params, threads)
