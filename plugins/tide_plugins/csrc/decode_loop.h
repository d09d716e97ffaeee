// Threads of a block of a decode loop's kernels. One block processes all rows in `take_tokens`, `loop_turn`, `exit_candidates`,
// `exit_gate` and `exit_merge`.
#pragma once

#include "portable.h"

namespace tide {

constexpr int32_t kLoopThreads = 256;

}  // namespace tide
