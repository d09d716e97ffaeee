// A stand-in for libcuda.so.1 that records everything and runs nothing, or what a test gives it to run kernels with.
#pragma once

#include <cuda.h>
#include <launch_plan.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tide::test
{

//! Recording one allocates nothing, so that a test can count what the library allocates.
struct Launch
{
    char const* function;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    CUstream stream;
    alignas(8) std::array<char, 256> params; //!< the bytes of the kernel's parameter struct

    template <typename Params>
    Params const& as() const
    {
        return *reinterpret_cast<Params const*>(params.data());
    }
};

struct Clear
{
    std::uintptr_t address;
    std::size_t bytes;
    CUstream stream;
    std::size_t before_launch; //!< how many launches came before it
};

//! What the driver answers, and what it was asked.
struct FakeDriver
{
    CUcontext context = reinterpret_cast<CUcontext>(0x1000); //!< null: the thread has none
    int sm_count = 108;
    std::string accepted_image = "stands for a kernel image of this GPU"; //!< what an image must begin with
    CUresult refusal = CUDA_ERROR_NO_BINARY_FOR_GPU;                     //!< the answer to other images
    CUresult launch_result = CUDA_SUCCESS;
    bool capturing = false; //!< then every call that a stream capture forbids fails

    //! When set, runs the kernels of tests/plugins/host_shim: entry point, its parameter struct, launch, order of the threads.
    int (*execute)(char const*, void const*, LaunchPlan const*, unsigned) = nullptr;

    int images_loaded = 0;
    std::map<std::string, int> shared_limit; //!< function -> dynamic shared memory it was allowed
    std::vector<Launch> launches;
    std::vector<Clear> clears;
};

//! The only one; assign a new one to start over.
FakeDriver& fake_driver();

} // namespace tide::test
