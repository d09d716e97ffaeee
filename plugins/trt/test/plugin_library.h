// The library under test, loaded as a plugin registry loads it, and its plugins from the outside: TensorRT's interfaces only.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

namespace tide::test
{

//! Load the library and give it a logger. Throws std::runtime_error when it or an entry point is missing.
void open_library(char const* path);

std::vector<nvinfer1::IPluginCreatorV3One*> creators();
nvinfer1::IPluginCreatorV3One& creator(std::string const& name);

//! What the library logged since the last call, one message a line.
std::string logged();

using PluginPtr = std::unique_ptr<nvinfer1::IPluginV3>;

//! A plugin from fields; null when the creator refuses them.
PluginPtr create(std::string const& name, std::vector<nvinfer1::PluginField> const& fields = {},
    nvinfer1::TensorRTPhase phase = nvinfer1::TensorRTPhase::kBUILD);

//! Its capabilities; they belong to the plugin.
nvinfer1::IPluginV3OneCore& core(nvinfer1::IPluginV3& plugin);
nvinfer1::IPluginV3OneBuild& build(nvinfer1::IPluginV3& plugin);
nvinfer1::IPluginV3OneRuntime& runtime(nvinfer1::IPluginV3& plugin);

//! A linear tensor.
nvinfer1::PluginTensorDesc tensor(nvinfer1::DataType type, std::vector<int64_t> const& dims);

//! The same where TensorRT speaks of a range: `dims` with -1 where they vary, at most `most`.
nvinfer1::DynamicPluginTensorDesc range(
    nvinfer1::DataType type, std::vector<int64_t> const& dims, std::vector<int64_t> const& most);

} // namespace tide::test
