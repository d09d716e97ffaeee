#include "fake_driver.h"

#include <exit_router_plan.h>
#include <exit_select_plan.h>

#include <cstring>
#include <mutex>
#include <set>

using tide::test::fake_driver;

namespace
{

std::mutex mutex;

CUresult forbidden_in_capture()
{
    return fake_driver().capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

std::string const& name_of(CUfunction function)
{
    return *reinterpret_cast<std::string const*>(function);
}

static_assert(sizeof(tide::exit_router_params) <= 256 && sizeof(tide::exit_select_params) <= 256);

std::size_t params_size(std::string const& function)
{
    return function.rfind("tide_exit_router", 0) == 0 ? sizeof(tide::exit_router_params) : sizeof(tide::exit_select_params);
}

} // namespace

tide::test::FakeDriver& tide::test::fake_driver()
{
    static FakeDriver driver;
    return driver;
}

extern "C"
{

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context)
{
    *context = fake_driver().context;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device)
{
    *device = 0;
    return fake_driver().context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice)
{
    *value = fake_driver().sm_count;
    return attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, void const* image)
{
    std::lock_guard<std::mutex> const lock(mutex);
    *module = reinterpret_cast<CUmodule>(const_cast<void*>(image));
    std::string const& accepted = fake_driver().accepted_image;
    if (std::strncmp(static_cast<char const*>(image), accepted.c_str(), accepted.size()) != 0)
    {
        return fake_driver().refusal;
    }
    ++fake_driver().images_loaded;
    return forbidden_in_capture();
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule, char const* name)
{
    static std::set<std::string> names;
    std::lock_guard<std::mutex> const lock(mutex);
    *function = reinterpret_cast<CUfunction>(const_cast<std::string*>(&*names.insert(name).first));
    return forbidden_in_capture();
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    std::lock_guard<std::mutex> const lock(mutex);
    fake_driver().shared_limit[name_of(function)] = value;
    return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? forbidden_in_capture() : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
    fake_driver().clears.push_back({static_cast<std::uintptr_t>(address), bytes, stream, fake_driver().launches.size()});
    if (fake_driver().execute != nullptr)
    {
        std::memset(reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), value, bytes);
    }
    return value == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
    unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** params, void** extra)
{
    tide::test::Launch launch{
        name_of(function).c_str(), {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, {}};
    std::memcpy(launch.params.data(), params[0], params_size(name_of(function)));
    fake_driver().launches.push_back(launch);
    tide::LaunchPlan const plan{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, 0, 0};
    if (fake_driver().execute != nullptr && fake_driver().execute(launch.function, params[0], &plan, 0) != 0)
    {
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    return extra == nullptr ? fake_driver().launch_result : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, char const** name)
{
    *name = error == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
        : error == CUDA_ERROR_LAUNCH_FAILED      ? "CUDA_ERROR_LAUNCH_FAILED"
        : error == CUDA_ERROR_OUT_OF_MEMORY      ? "CUDA_ERROR_OUT_OF_MEMORY"
                                                 : "another error";
    return CUDA_SUCCESS;
}

} // extern "C"
