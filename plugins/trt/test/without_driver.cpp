// On a machine without a driver a network can still be described; only what needs the GPU fails, and says why.

#include "checks.h"
#include "router_tensors.h"

#include <dlfcn.h>

using namespace tide::test;
using nvinfer1::DataType;

TEST(a_missing_driver_is_named)
{
    PluginPtr const plugin = create_router();
    auto const ranges = router_ranges(1, 1, DataType::kHALF);
    int32_t const result = build(*plugin).configurePlugin(ranges.data(), 5, nullptr, 1);
    if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr)
    {
        CHECK(result == 4 && logged().find("install the NVIDIA driver") != std::string::npos);
    }
    else
    {
        CHECK(result == 6); // there is a driver, and this thread has no CUDA context
    }
}
