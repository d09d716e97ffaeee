#include "kernel_launch.h"

#include "errors.h"
#include "kernel_images.h"

#include <map>
#include <mutex>
#include <utility>

namespace tide::trt
{
namespace
{

constexpr uint32_t kSharedWithoutAsking = 48 * 1024; // bytes a launch may take without opting in, on every architecture

//! What the driver says of an image that is for another GPU, or newer than itself: the next image may do.
bool is_for_another_gpu(CUresult result)
{
    return result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_INVALID_IMAGE
        || result == CUDA_ERROR_INVALID_SOURCE || result == CUDA_ERROR_INVALID_PTX
        || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
}

CUmodule load_module(CudaDriver const& driver, std::string const& kernel)
{
    std::string tried;
    for (std::size_t i = 0; i < kKernelImageCount; ++i)
    {
        KernelImage const& image = kKernelImages[i];
        if (kernel != image.kernel)
        {
            continue;
        }
        CUmodule module = nullptr;
        CUresult const result = driver.module_load_data(&module, image.data);
        if (result == CUDA_SUCCESS)
        {
            return module;
        }
        tried += std::string(tried.empty() ? "" : ", ") + image.file + " (" + driver.error_name(result) + ")";
        if (!is_for_another_gpu(result))
        {
            driver.check(result, "cuModuleLoadData");
        }
    }
    throw PluginError(Status::kNoKernel,
        "no image of kernel " + kernel + " runs on this GPU; tried: " + (tried.empty() ? "none is embedded" : tried)
            + "; build libtide_plugins.so with -DTIDE_CUDA_ARCHITECTURES naming it");
}

//! The module of `kernel` in the current context. Modules are never unloaded: by the time static objects are destroyed the
//! driver may be gone, and it frees them itself.
CUmodule module_of(CudaDriver const& driver, std::string const& kernel)
{
    static std::mutex mutex;
    static std::map<std::pair<CUcontext, std::string>, CUmodule> loaded;

    CUcontext context = nullptr;
    driver.check(driver.ctx_get_current(&context), "cuCtxGetCurrent");
    if (context == nullptr)
    {
        throw PluginError(Status::kCuda, "this thread has no CUDA context; select a device (cudaSetDevice) first");
    }
    std::lock_guard<std::mutex> const lock(mutex);
    CUmodule& module = loaded[{context, kernel}];
    if (module == nullptr)
    {
        module = load_module(driver, kernel);
    }
    return module;
}

} // namespace

CUfunction load_function(std::string const& kernel, std::string const& entry, uint32_t shared_bytes)
{
    CudaDriver const& driver = CudaDriver::get();
    CUfunction function = nullptr;
    driver.check(driver.module_get_function(&function, module_of(driver, kernel), entry.c_str()), "cuModuleGetFunction");
    if (shared_bytes > kSharedWithoutAsking)
    {
        driver.check(driver.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                         static_cast<int>(shared_bytes)),
            "cuFuncSetAttribute");
    }
    return function;
}

int32_t current_sm_count()
{
    CudaDriver const& driver = CudaDriver::get();
    CUdevice device = 0;
    driver.check(driver.ctx_get_device(&device), "cuCtxGetDevice");
    int count = 0;
    driver.check(
        driver.device_get_attribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "cuDeviceGetAttribute");
    return count;
}

void clear(uint32_t* counters, uint32_t count, CUstream stream)
{
    CudaDriver const& driver = CudaDriver::get();
    auto const address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(counters));
    driver.check(driver.memset_async(address, 0, count * sizeof(uint32_t), stream), "cuMemsetD8Async");
}

void launch(CUfunction function, LaunchPlan const& plan, void* params, CUstream stream)
{
    CudaDriver const& driver = CudaDriver::get();
    void* arguments[] = {params};
    driver.check(driver.launch_kernel(function, plan.grid[0], plan.grid[1], plan.grid[2], plan.block[0], plan.block[1],
                     plan.block[2], plan.shared_bytes, stream, arguments, nullptr),
        "cuLaunchKernel");
}

} // namespace tide::trt
