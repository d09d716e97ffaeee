// The fields a plugin is created from (an ONNX node's attributes, or what an engine stored): typed, checked, all known.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tide::trt
{

//! Reads a collection field by field; every error is a PluginError (kBadField) that names the field and what it must be.
class Fields
{
public:
    //! `known`: the names that the plugin takes. Throws for an unknown name, one given twice, or one without data.
    Fields(nvinfer1::PluginFieldCollection const* collection, std::vector<nvinfer1::PluginField> const& known);

    //! An integer (int32 or int64) in [low, high], or `fallback` when the field is not given.
    int32_t integer(char const* name, int32_t fallback, int32_t low, int32_t high) const;

    //! A finite number (float32 or float64) in [low, high], or `fallback` when the field is not given.
    float number(char const* name, float fallback, float low, float high) const;

private:
    nvinfer1::PluginField const* find(char const* name) const;

    nvinfer1::PluginFieldCollection given_{};
};

} // namespace tide::trt
