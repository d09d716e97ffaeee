// Launch plan of the decode-loop kernels that process all rows in one block: `loop_turn`, `exit_candidates`,
// `exit_gate`, `exit_merge`.
#pragma once

#include "launch_plan.h"

namespace tide {

constexpr int32_t kLoopThreads = 256;

inline TIDE_HOST_DEVICE LaunchPlan plan_loop_block() { return {{1, 1, 1}, {uint32_t(kLoopThreads), 1, 1}, 0, 0, 0}; }

}  // namespace tide
