// The CUDA driver's functions, looked up in libcuda.so.1 when first needed.
//
// The library is not linked against CUDA: it loads, and its creators and shapes work, on a machine without a driver, where
// engines may be inspected, and where its tests run.
#pragma once

#include <cuda.h>

#include <string>

namespace tide::trt
{

struct CudaDriver
{
    decltype(&::cuCtxGetCurrent) ctx_get_current;
    decltype(&::cuCtxGetDevice) ctx_get_device;
    decltype(&::cuDeviceGetAttribute) device_get_attribute;
    decltype(&::cuModuleLoadData) module_load_data;
    decltype(&::cuModuleGetFunction) module_get_function;
    decltype(&::cuFuncSetAttribute) func_set_attribute;
    decltype(&::cuLaunchKernel) launch_kernel;
    decltype(&::cuMemsetD8Async) memset_async;
    decltype(&::cuGetErrorName) get_error_name;

    //! The driver of this process. Throws PluginError (kNoDriver) when it is missing.
    static CudaDriver const& get();

    //! Throws PluginError (kCuda), naming `call` and the driver's error, unless `result` is success.
    void check(CUresult result, char const* call) const;

    //! The driver's name of an error, such as CUDA_ERROR_NO_BINARY_FOR_GPU.
    std::string error_name(CUresult result) const;
};

} // namespace tide::trt
