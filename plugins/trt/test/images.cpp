// Which kernel image is loaded, how often, and what is said when none will do.

#include "checks.h"
#include "fake_driver.h"
#include "router_tensors.h"

using namespace tide::test;
using nvinfer1::DataType;

namespace
{

int32_t prepare(nvinfer1::IPluginV3& plugin)
{
    auto const inputs = router_inputs({1, 1}, DataType::kHALF);
    return runtime(plugin).onShapeChange(inputs.data(), 5, nullptr, 1);
}

//! Modules are kept by context: one that no other test used has none yet.
void start_over(std::uintptr_t context)
{
    fake_driver() = {};
    fake_driver().context = reinterpret_cast<CUcontext>(context);
}

} // namespace

TEST(the_image_of_this_gpu_is_found_behind_others)
{
    start_over(0x3000);
    PluginPtr const plugin = create_router();
    CHECK(prepare(*plugin) == 0 && fake_driver().images_loaded == 1);
}

TEST(a_kernel_is_loaded_once_a_context)
{
    start_over(0x4000);
    PluginPtr const one = create_router(), other = create_router();
    CHECK(prepare(*one) == 0 && prepare(*other) == 0 && prepare(*one) == 0 && fake_driver().images_loaded == 1);
    fake_driver().context = reinterpret_cast<CUcontext>(0x5000); // a second GPU
    CHECK(prepare(*one) == 0 && fake_driver().images_loaded == 2);
}

TEST(a_gpu_without_image_is_named_with_what_was_tried)
{
    start_over(0x6000);
    fake_driver().accepted_image = "of no GPU";
    PluginPtr const plugin = create_router();
    CHECK(prepare(*plugin) == 5);
    std::string const message = logged();
    CHECK(message.find("exit_router.other.ptx (CUDA_ERROR_NO_BINARY_FOR_GPU)") != std::string::npos);
    CHECK(message.find("exit_router.this.ptx") != std::string::npos && message.find("exit_select") == std::string::npos);
    CHECK(message.find("-DTIDE_CUDA_ARCHITECTURES") != std::string::npos);
}

TEST(another_failure_to_load_is_not_taken_for_another_gpu)
{
    start_over(0x7000);
    fake_driver().refusal = CUDA_ERROR_OUT_OF_MEMORY;
    PluginPtr const plugin = create_router();
    CHECK(prepare(*plugin) == 6 && logged() == "TideExitRouter: cuModuleLoadData failed: CUDA_ERROR_OUT_OF_MEMORY\n");
    fake_driver().refusal = CUDA_ERROR_NO_BINARY_FOR_GPU;
    CHECK(prepare(*plugin) == 0); // and is tried again
}

TEST(a_thread_without_context_is_told_so)
{
    start_over(0);
    PluginPtr const plugin = create_router();
    CHECK(prepare(*plugin) == 6 && logged().find("no CUDA context") != std::string::npos);
}
