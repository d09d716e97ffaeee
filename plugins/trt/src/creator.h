// Makes plugins from fields, when a network is built and when an engine is loaded.
#pragma once

#include "fields.h"
#include "logging.h"
#include "plugin.h"

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

namespace tide::trt
{

//! Nothing in it changes after construction, so that any number of threads may create plugins at once.
template <typename Plugin>
class Creator : public nvinfer1::IPluginCreatorV3One
{
public:
    nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* given,
        nvinfer1::TensorRTPhase phase) noexcept override
    {
        std::unique_ptr<Plugin> plugin;
        guarded(Plugin::kName, [&] { plugin = std::make_unique<Plugin>(Fields(given, Plugin::known_fields(phase))); });
        return plugin.release();
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override
    {
        return &collection_;
    }

    nvinfer1::AsciiChar const* getPluginName() const noexcept override
    {
        return Plugin::kName;
    }

    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override
    {
        return kPluginVersion;
    }

    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override
    {
        return kPluginNamespace;
    }

private:
    std::vector<nvinfer1::PluginField> const fields_ = Plugin::known_fields(nvinfer1::TensorRTPhase::kBUILD);
    nvinfer1::PluginFieldCollection const collection_{static_cast<int32_t>(fields_.size()), fields_.data()};
};

} // namespace tide::trt
