// The compiled kernels that the build put into the library (cmake/KernelImages.cmake writes the definitions).
#pragma once

#include <cstddef>

namespace tide::trt
{

//! A fat binary, cubin or PTX text (0-terminated), as cuModuleLoadData takes it.
struct KernelImage
{
    char const* kernel; //!< "exit_router" or "exit_select"
    char const* file;   //!< where it came from, for messages
    void const* data;
};

extern KernelImage const kKernelImages[];
extern std::size_t const kKernelImageCount;

} // namespace tide::trt
