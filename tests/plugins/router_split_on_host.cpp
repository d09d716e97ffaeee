// csrc/exit_router_split.cuh as one function of a host library: both launches, as TensorRT would make them.
#include "host_shim/kernels_on_host.cpp"

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#include "exit_router_split.cuh"

// What TensorRT passes to the two kernels, one after the other.
struct SplitArguments {
  const void *hidden, *down;
  const float *down_bias, *up, *up_bias;
  int rows, hidden_size, width, chunk, epsilon;
  float *partial, *score;
};

template <typename T, void (*project)(const T*, const T*, int, int, int, int, float*)>
void run_project(SplitArguments a) {
  project(static_cast<const T*>(a.hidden), static_cast<const T*>(a.down), a.rows, a.hidden_size, a.width, a.chunk, a.partial);
}

template <typename T, void (*kernel)(const T*, const float*, const float*, const float*, const float*, int, int, int, int, float*)>
void run_score(SplitArguments a) {
  kernel(static_cast<const T*>(a.hidden), a.partial, a.down_bias, a.up, a.up_bias, a.rows, a.hidden_size, a.width, a.epsilon, a.score);
}

extern "C" int tide_split_launch(const char* entry_point, const SplitArguments* arguments, const tide::LaunchPlan* plan, unsigned order) {
#define TIDE_TRY_SPLIT(suffix, T)                                                                               \
  if (std::strcmp(entry_point, "tide_exit_router_project_" #suffix) == 0)                                       \
    return run_grid(run_project<T, tide_exit_router_project_##suffix>, arguments, *plan, order);                \
  if (std::strcmp(entry_point, "tide_exit_router_score_" #suffix) == 0)                                         \
    return run_grid(run_score<T, tide_exit_router_score_##suffix>, arguments, *plan, order);
  TIDE_TRY_SPLIT(f32, float) TIDE_TRY_SPLIT(f16, __half) TIDE_TRY_SPLIT(bf16, __nv_bfloat16)
  return 2;
}
