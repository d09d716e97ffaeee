#include "cuda_driver.h"

#include "errors.h"

#include <dlfcn.h>

// cuda.h maps a name to the version of the function that its types describe; the symbol must be of that version too.
#define TIDE_STRINGIFY(name) #name
#define TIDE_SYMBOL(name) TIDE_STRINGIFY(name)

namespace tide::trt
{
namespace
{

void* open_driver()
{
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
    {
        throw PluginError(Status::kNoDriver,
            std::string("the CUDA driver cannot be loaded (") + dlerror() + "); install the NVIDIA driver");
    }
    return library;
}

template <typename Function>
void look_up(void* library, char const* name, Function& function)
{
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr)
    {
        throw PluginError(Status::kNoDriver,
            std::string("libcuda.so.1 has no ") + name + "; it is too old for TensorRT 10, install a newer NVIDIA driver");
    }
}

CudaDriver open()
{
    void* const library = open_driver();
    CudaDriver driver{};
    look_up(library, TIDE_SYMBOL(cuCtxGetCurrent), driver.ctx_get_current);
    look_up(library, TIDE_SYMBOL(cuCtxGetDevice), driver.ctx_get_device);
    look_up(library, TIDE_SYMBOL(cuDeviceGetAttribute), driver.device_get_attribute);
    look_up(library, TIDE_SYMBOL(cuModuleLoadData), driver.module_load_data);
    look_up(library, TIDE_SYMBOL(cuModuleGetFunction), driver.module_get_function);
    look_up(library, TIDE_SYMBOL(cuFuncSetAttribute), driver.func_set_attribute);
    look_up(library, TIDE_SYMBOL(cuLaunchKernel), driver.launch_kernel);
    look_up(library, TIDE_SYMBOL(cuMemsetD8Async), driver.memset_async);
    look_up(library, TIDE_SYMBOL(cuGetErrorName), driver.get_error_name);
    return driver;
}

} // namespace

CudaDriver const& CudaDriver::get()
{
    static CudaDriver const driver = open(); // a failed look-up throws and is tried again by the next call
    return driver;
}

std::string CudaDriver::error_name(CUresult result) const
{
    char const* name = nullptr;
    return get_error_name(result, &name) == CUDA_SUCCESS ? name : "CUDA error " + std::to_string(result);
}

void CudaDriver::check(CUresult result, char const* call) const
{
    if (result != CUDA_SUCCESS)
    {
        throw PluginError(Status::kCuda, std::string(call) + " failed: " + error_name(result));
    }
}

} // namespace tide::trt
