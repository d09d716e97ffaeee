// The tensors that the plugins take: linear, fp32, fp16 or bf16, all leading dimensions together being rows.
#pragma once

#include "errors.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <limits>
#include <string>

namespace tide::trt
{

constexpr bool is_state_type(nvinfer1::DataType type) noexcept
{
    return type == nvinfer1::DataType::kFLOAT || type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16;
}

constexpr bool is_linear(nvinfer1::PluginTensorDesc const& desc, nvinfer1::DataType type) noexcept
{
    return desc.format == nvinfer1::PluginFormat::kLINEAR && desc.type == type;
}

constexpr int32_t element_bytes(nvinfer1::DataType type) noexcept
{
    return type == nvinfer1::DataType::kFLOAT ? 4 : 2;
}

//! What the kernels' entry points end with.
constexpr char const* type_suffix(nvinfer1::DataType type) noexcept
{
    switch (type)
    {
    case nvinfer1::DataType::kHALF: return "f16";
    case nvinfer1::DataType::kBF16: return "bf16";
    default: return "f32";
    }
}

//! The rows of [..., H]. Throws PluginError (kBadTensor) when they do not fit the kernels' int32.
inline int32_t rows_of(nvinfer1::Dims const& dims)
{
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < dims.nbDims; ++i)
    {
        rows *= dims.d[i];
        if (rows < 0 || rows > std::numeric_limits<int32_t>::max())
        {
            throw PluginError(Status::kBadTensor, "the input has too many rows, or rows that are not known yet");
        }
    }
    return static_cast<int32_t>(rows);
}

//! The same as an expression, for shapes that are known only when an engine runs.
inline nvinfer1::IDimensionExpr const* rows_of(nvinfer1::DimsExprs const& dims, nvinfer1::IExprBuilder& builder)
{
    nvinfer1::IDimensionExpr const* rows = builder.constant(1);
    for (int32_t i = 0; i + 1 < dims.nbDims; ++i)
    {
        rows = builder.operation(nvinfer1::DimensionOperation::kPROD, *rows, *dims.d[i]);
    }
    return rows;
}

//! Throws PluginError (kBadTensor) unless `dims` is `rank`-dimensional with `last` as its last dimension (-1: any, or unknown).
inline void require_shape(char const* name, nvinfer1::Dims const& dims, int32_t rank, int64_t last)
{
    int64_t const found = dims.nbDims == 0 ? -1 : dims.d[dims.nbDims - 1];
    if (dims.nbDims != rank || (found != last && found != -1 && last != -1))
    {
        throw PluginError(Status::kBadTensor,
            std::string(name) + " has " + std::to_string(dims.nbDims) + " dimensions, the last being "
                + std::to_string(found) + "; it must have " + std::to_string(rank) + ", the last being "
                + std::to_string(last));
    }
}

inline void require_count(char const* what, int32_t found, int32_t expected)
{
    if (found != expected)
    {
        throw PluginError(Status::kBadTensor,
            std::string("got ") + std::to_string(found) + " " + what + "; it must be " + std::to_string(expected));
    }
}

} // namespace tide::trt
