// Messages go to the logger that TensorRT hands over through setLoggerFinder, else to stderr.
#pragma once

#include "errors.h"

#include <NvInferRuntime.h>

namespace tide::trt
{

//! Keep the first finder that is not null, as TensorRT's own plugin libraries do; safe from any thread.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

//! Log `where: what` as an error; safe from any thread, never throws.
void log_error(char const* where, char const* what) noexcept;

//! Run `body`; on an exception log it under `where` and return its Status as the number that TensorRT gets.
template <typename Body>
int32_t guarded(char const* where, Body&& body) noexcept
{
    try
    {
        body();
        return static_cast<int32_t>(Status::kOk);
    }
    catch (PluginError const& error)
    {
        log_error(where, error.what());
        return static_cast<int32_t>(error.status());
    }
    catch (std::exception const& error)
    {
        log_error(where, error.what());
        return static_cast<int32_t>(Status::kInternal);
    }
}

} // namespace tide::trt
