// A kernel's launch plan: a pure function of the problem's shape and the GPU's number of multiprocessors.
#pragma once

#include "portable.h"

namespace tide {

struct LaunchPlan {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;    // dynamic; above 48 KiB the launcher has to opt in
  uint32_t counters;        // uint32 in device memory, zero before the first launch; every launch leaves them zero
  int64_t workspace_bytes;  // 256-byte aligned, contents irrelevant
};

TIDE_HOST_DEVICE constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
TIDE_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }
TIDE_HOST_DEVICE constexpr int64_t clamp(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : (value > most ? most : value);
}

}  // namespace tide
