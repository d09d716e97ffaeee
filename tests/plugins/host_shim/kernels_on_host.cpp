// The kernels as functions of a host library. Blocks run one after the other, in an order that `order` shuffles as it does
// threads.
#include <cstdlib>
#include <numeric>

#include "choose_token.cuh"
#include "exit_candidates.cuh"
#include "exit_gate.cuh"
#include "exit_inputs.cuh"
#include "exit_join.cuh"
#include "exit_merge.cuh"
#include "exit_router.cuh"
#include "exit_score.cuh"
#include "loop_turn.cuh"
#include "take_tokens.cuh"
#include "text_accept.cuh"
#include "text_drafts.cuh"

namespace {

struct LaunchPlan {
  uint32_t grid[3], block[3], shared_bytes;
};

// ExitRouterParams of tide_plugins/params.py.
struct RouterArguments {
  const void* hidden;
  const float *down, *down_bias, *up, *up_bias;
  float *score, *partial;
  int32_t rows, hidden_size, width, chunk, epsilon;
};

template <typename T, void (*kernel)(const T*, const float*, int, int, int, int, float*)>
void project(RouterArguments a) {
  kernel(static_cast<const T*>(a.hidden), a.down, a.rows, a.hidden_size, a.width, a.chunk, a.partial);
}

template <typename T, void (*kernel)(const T*, const float*, const float*, const float*, const float*, int, int, int, int, int, float*)>
void score(RouterArguments a) {
  kernel(static_cast<const T*>(a.hidden), a.partial, a.down_bias, a.up, a.up_bias, a.rows, a.hidden_size, a.width, a.chunk, a.epsilon,
         a.score);
}

template <typename Params>
struct Launch {
  void (*kernel)(Params);
  const Params* params;
};

template <typename Params>
int run_grid(void (*kernel)(Params), const void* params, const LaunchPlan& plan, unsigned order) {
  static host::Block block;
  Launch<Params> launch{kernel, static_cast<const Params*>(params)};
  const auto body = [](void* argument) {
    const auto* given = static_cast<Launch<Params>*>(argument);
    given->kernel(*given->params);
  };
  std::vector<unsigned> blocks(plan.grid[0] * plan.grid[1] * plan.grid[2]);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (order == 1) std::reverse(blocks.begin(), blocks.end());
  if (order > 1) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(order));
  host::grid_size = {plan.grid[0], plan.grid[1], plan.grid[2]};
  host::block_size = {plan.block[0], 1, 1};
  bool complete = true;
  for (unsigned number : blocks) {
    host::block_index = {number % plan.grid[0], number / plan.grid[0] % plan.grid[1], number / plan.grid[0] / plan.grid[1]};
    // Its own allocation for every block: a sanitizer sees accesses behind it, and 0xFF bytes are NaNs until written.
    // Aligned as declared, and not better.
    void* allocated = nullptr;
    if (posix_memalign(&allocated, 2 * tide::kDynamicSharedAlignment, tide::kDynamicSharedAlignment + plan.shared_bytes)) std::abort();
    host::shared_memory = static_cast<unsigned char*>(allocated) + tide::kDynamicSharedAlignment;
    std::memset(host::shared_memory, 0xFF, plan.shared_bytes);
    complete = block.run(int(plan.block[0]), order, body, &launch) && complete;
    std::free(allocated);
  }
  return complete ? 0 : 1;
}

}  // namespace

// Returns 0, or 1 on a deadlock of threads, 2 for an unknown name.
extern "C" int tide_launch(const char* entry_point, const void* params, const LaunchPlan* plan, unsigned order) {
#define TIDE_TRY(kernel) \
  if (std::strcmp(entry_point, #kernel) == 0) return run_grid(kernel, params, *plan, order);
#define TIDE_TRY_ALL(kernel) TIDE_TRY(kernel##_f32) TIDE_TRY(kernel##_f16) TIDE_TRY(kernel##_bf16)
#define TIDE_TRY_ROUTER(suffix, T)                                                                                                  \
  if (std::strcmp(entry_point, "tide_exit_router_project_" #suffix) == 0)                                                           \
    return run_grid(project<T, tide_exit_router_project_##suffix>, params, *plan, order);                                           \
  if (std::strcmp(entry_point, "tide_exit_router_score_" #suffix) == 0)                                                             \
    return run_grid(score<T, tide_exit_router_score_##suffix>, params, *plan, order);
  TIDE_TRY_ROUTER(f32, float) TIDE_TRY_ROUTER(f16, __half) TIDE_TRY_ROUTER(bf16, __nv_bfloat16)
  TIDE_TRY_ALL(tide_choose_peak)
  TIDE_TRY_ALL(tide_choose_cut)
  TIDE_TRY_ALL(tide_choose_race)
  TIDE_TRY_ALL(tide_exit_score)
  TIDE_TRY(tide_take_tokens_f32)
  TIDE_TRY(tide_loop_turn_f32)
  TIDE_TRY(tide_exit_join_f32)
  TIDE_TRY(tide_exit_candidates_f32)
  TIDE_TRY(tide_exit_gate_f32)
  TIDE_TRY(tide_exit_inputs_f32)
  TIDE_TRY(tide_exit_merge_f32)
  TIDE_TRY(tide_text_accept_f32)
  TIDE_TRY(tide_text_drafts_f32)
  return 2;
}

// Graph conditions set by the last launches; cleared when read.
extern "C" void tide_graph_condition(uint64_t* handle, uint32_t* value, int32_t* calls) {
  *handle = host::condition_handle, *value = host::condition_value, *calls = host::condition_calls;
  host::condition_handle = 0, host::condition_value = 0, host::condition_calls = 0;
}
