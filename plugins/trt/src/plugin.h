// What the plugins share: one object that is plugin, core, build and runtime capability, as IPluginV3 allows.
#pragma once

#include "fields.h"
#include "logging.h"

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

namespace tide::trt
{

inline constexpr char const* kPluginNamespace = "tide";
inline constexpr char const* kPluginVersion = "1";

//! Everything that does not depend on what the plugin computes.
//!
//! `Derived` gives: `kName`; `known_fields(phase)`, the fields it is made from when a network is built and when an engine is
//! loaded; a constructor from `Fields`; and `stored_fields()`, the fields that an engine keeps, pointing into the object.
template <typename Derived>
class PluginV3 : public nvinfer1::IPluginV3,
                 public nvinfer1::IPluginV3OneCore,
                 public nvinfer1::IPluginV3OneBuild,
                 public nvinfer1::IPluginV3OneRuntime
{
public:
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override
    {
        switch (type)
        {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3* clone() noexcept override
    {
        std::unique_ptr<Derived> copy;
        guarded(Derived::kName, [&] { copy = std::make_unique<Derived>(static_cast<Derived const&>(*this)); });
        return copy.release();
    }

    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override
    {
        return clone(); // the kernels are found when the shapes are known; nothing else belongs to a context
    }

    nvinfer1::AsciiChar const* getPluginName() const noexcept override
    {
        return Derived::kName;
    }

    nvinfer1::AsciiChar const* getPluginVersion() const noexcept override
    {
        return kPluginVersion;
    }

    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override
    {
        return kPluginNamespace;
    }

    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override
    {
        // Made anew each time: a clone's list must point into the clone.
        int32_t const failed = guarded(Derived::kName, [&] {
            fields_ = static_cast<Derived*>(this)->stored_fields();
            collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
        });
        return failed != 0 ? nullptr : &collection_;
    }

private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

} // namespace tide::trt
