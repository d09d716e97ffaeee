// Threads of a block of a decode loop's kernels. One block processes all rows in `take_tokens`, `loop_turn`, `exit_candidates`,
// `exit_gate`, `exit_merge` and `text_accept`.
#pragma once

#include "portable.h"

namespace tide {

constexpr int32_t kLoopThreads = 256;

}  // namespace tide
