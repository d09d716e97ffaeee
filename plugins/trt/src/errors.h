// What a plugin method returns to TensorRT when it fails, and how a failure travels to that boundary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tide::trt
{

//! Returned by the int32_t methods of the plugins; TensorRT reports the number, the logger gets the sentence.
enum class Status : int32_t
{
    kOk = 0,
    kBadField = 1,     //!< a plugin field is missing, of the wrong type, or out of range
    kBadTensor = 2,    //!< an input's or output's number, shape or data type is not what the plugin takes
    kNotReady = 3,     //!< enqueue without workspace, or before onShapeChange
    kNoDriver = 4,     //!< libcuda.so.1 cannot be loaded, or is older than the functions that the plugin calls
    kNoKernel = 5,     //!< no embedded kernel image runs on this GPU
    kCuda = 6,         //!< a CUDA call failed
    kInternal = 7,     //!< anything else, such as memory exhausted on the host
};

//! Thrown inside the library only; every method that TensorRT calls turns it into a log line and a Status.
class PluginError : public std::runtime_error
{
public:
    PluginError(Status status, std::string const& what)
        : std::runtime_error(what)
        , status_(status)
    {
    }

    Status status() const noexcept
    {
        return status_;
    }

private:
    Status status_;
};

} // namespace tide::trt
