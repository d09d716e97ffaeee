// The part of CUDA C++ that the kernels use, for a host compiler; included before a kernel's own file (-include).
// Atomics and fences are plain: one OS thread runs all, and blocks run one after the other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) float4 {
  float x, y, z, w;
};

namespace host {
inline Index block_index{}, block_size{}, grid_size{};
inline unsigned char* shared_memory = nullptr;

template <typename T>
T lane_value(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
const uint64_t* exchange(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return Block::active()->exchange(bits);
}
inline int lane() { return Block::active()->current().number % 32; }
}  // namespace host

#define threadIdx (host::Block::active()->current().index)
#define blockIdx (host::block_index)
#define blockDim (host::block_size)
#define gridDim (host::grid_size)

inline void __syncthreads() { host::Block::active()->sync(); }
inline int __syncthreads_or(int vote) { return host::Block::active()->sync_or(vote != 0); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int offset) {
  const int lane = host::lane();
  return host::lane_value<T>(host::exchange(value)[lane ^ offset]);
}
template <typename T>
T atomicAdd(T* address, T more) {
  return (*address += more) - more;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned old = *address;
  *address = old >= last ? 0 : old + 1;
  return old;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
inline float __int_as_float(int bits) { return host::lane_value<float>(uint32_t(bits)); }
inline float __uint_as_float(uint32_t bits) { return host::lane_value<float>(bits); }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)a * b >> 64); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

namespace tide {
template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(host::shared_memory);
}
}  // namespace tide

#ifdef TIDE_GRAPH_CONDITION
namespace host {
inline uint64_t condition_handle = 0;
inline int condition_calls = 0;
inline unsigned condition_value = 0;
}  // namespace host
inline void cudaGraphSetConditional(unsigned long long handle, unsigned value) {
  host::condition_handle = handle, host::condition_value = value, ++host::condition_calls;
}
#endif
