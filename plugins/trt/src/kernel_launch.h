// From a kernel's name to its launch: each kernel is loaded once into each CUDA context.
#pragma once

#include "cuda_driver.h"

#include <launch_plan.h>

#include <cstdint>
#include <string>

namespace tide::trt
{

//! The entry point `entry` of `kernel` in the calling thread's CUDA context, allowed to take `shared_bytes` of dynamic shared
//! memory. Takes a lock and, the first time, loads the kernel: call it before the launches, not among them.
//!
//! Throws PluginError: kNoDriver, kNoKernel when no embedded image runs on the GPU, kCuda (no current context, no memory).
CUfunction load_function(std::string const& kernel, std::string const& entry, uint32_t shared_bytes);

//! Multiprocessors of the calling thread's current device, which launch plans depend on.
int32_t current_sm_count();

//! Zero `count` counters on `stream`; what is said of `launch` holds here too.
void clear(uint32_t* counters, uint32_t count, CUstream stream);

//! Launch `function` on `stream` with one parameter, the struct at `params`. Nothing is allocated and nothing waits, so that the
//! stream may be one that is being captured. Throws PluginError (kCuda).
void launch(CUfunction function, LaunchPlan const& plan, void* params, CUstream stream);

} // namespace tide::trt
