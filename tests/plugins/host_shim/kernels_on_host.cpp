// The kernels as functions of a host library. Blocks run one after the other, in an order that `order` shuffles as it does
// threads.
#include <cstdlib>
#include <numeric>
#include <utility>

#include "draft_verify.cuh"
#include "exit_candidates.cuh"
#include "exit_gate.cuh"
#include "exit_join.cuh"
#include "exit_merge.cuh"
#include "exit_router.cuh"
#include "exit_score.cuh"
#include "exit_select.cuh"
#include "exit_translate.cuh"
#include "loop_turn.cuh"
#include "tensor_core_on_host.h"

namespace {

template <typename Params>
struct Launch {
  void (*kernel)(Params);
  const Params* params;
};

template <typename Params>
int run_grid(void (*kernel)(Params), const void* params, const tide::LaunchPlan& plan, unsigned order) {
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
  const bool misaligned = std::exchange(host::misaligned, 0) > 0;
  return !complete ? 1 : misaligned ? 3 : 0;
}

}  // namespace

// Returns 0, or 1 on a deadlock of threads, 2 for an unknown name, 3 on a tensor core's access that is not aligned.
extern "C" int tide_launch(const char* entry_point, const void* params, const tide::LaunchPlan* plan, unsigned order) {
#define TIDE_TRY(kernel) \
  if (std::strcmp(entry_point, #kernel) == 0) return run_grid(kernel, params, *plan, order);
#define TIDE_TRY_ALL(kernel) TIDE_TRY(kernel##_f32) TIDE_TRY(kernel##_f16) TIDE_TRY(kernel##_bf16)
  TIDE_TRY_ALL(tide_exit_router)
  TIDE_TRY_ALL(tide_exit_router_tiled)
  TIDE_TRY_ALL(tide_exit_select)
  TIDE_TRY_ALL(tide_exit_translate_down)
  TIDE_TRY_ALL(tide_exit_translate_up)
  TIDE_TRY_ALL(tide_draft_verify)
  TIDE_TRY_ALL(tide_exit_score)
  TIDE_TRY(tide_loop_turn_f32)
  TIDE_TRY(tide_exit_join_f32)
  TIDE_TRY(tide_exit_candidates_f32)
  TIDE_TRY(tide_exit_gate_f32)
  TIDE_TRY(tide_exit_merge_f32)
  return 2;
}

extern "C" void tide_philox(const uint32_t* counter, uint64_t key, uint32_t* words) {
  const tide::Philox drawn = tide::philox_4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key);
  std::memcpy(words, drawn.words, sizeof drawn.words);
}

// Graph conditions set by the last launches; cleared when read.
extern "C" void tide_graph_condition(uint64_t* handle, uint32_t* value, int32_t* calls) {
  *handle = host::condition_handle, *value = host::condition_value, *calls = host::condition_calls;
  host::condition_handle = 0, host::condition_value = 0, host::condition_calls = 0;
}
