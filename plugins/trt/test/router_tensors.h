// The tensors of a router, of width R over hidden states of size H, as TensorRT describes them.
#pragma once

#include "plugin_library.h"

namespace tide::test
{

constexpr int64_t kHiddenSize = 4096;
constexpr int64_t kWidth = 128;

//! hidden [leading..., H] and the weights; with `layer_norm` down_sum too.
inline std::vector<nvinfer1::PluginTensorDesc> router_inputs(
    std::vector<int64_t> leading, nvinfer1::DataType type, bool layer_norm = false, int64_t width = kWidth)
{
    using nvinfer1::DataType;
    leading.push_back(kHiddenSize);
    std::vector<nvinfer1::PluginTensorDesc> inputs{tensor(type, leading), tensor(type, {width, kHiddenSize}),
        tensor(DataType::kFLOAT, {width}), tensor(DataType::kFLOAT, {width}), tensor(DataType::kFLOAT, {1})};
    if (layer_norm)
    {
        inputs.push_back(tensor(DataType::kFLOAT, {width}));
    }
    return inputs;
}

//! The same as ranges: hidden [-1, -1, H] of at most `batch` x `tokens` rows.
inline std::vector<nvinfer1::DynamicPluginTensorDesc> router_ranges(
    int64_t batch, int64_t tokens, nvinfer1::DataType type, int64_t width = kWidth)
{
    std::vector<nvinfer1::DynamicPluginTensorDesc> ranges;
    for (auto const& desc : router_inputs({batch, tokens}, type, false, width))
    {
        ranges.push_back({desc, desc.dims, desc.dims, desc.dims});
    }
    ranges[0].desc.dims.d[0] = ranges[0].desc.dims.d[1] = -1;
    return ranges;
}

inline PluginPtr create_router(int32_t partition = 0, float threshold = 0.5F, float epsilon = 1e-6F)
{
    using nvinfer1::PluginFieldType;
    return create("TideExitRouter",
        {{"partition", &partition, PluginFieldType::kINT32, 1}, {"threshold", &threshold, PluginFieldType::kFLOAT32, 1},
            {"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1}});
}

} // namespace tide::test
