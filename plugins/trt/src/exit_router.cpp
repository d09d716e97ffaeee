// Fields, shapes and types of TideExitRouter. What happens per inference is in exit_router_enqueue.cpp.

#include "exit_router.h"

#include "kernel_launch.h"
#include "tensors.h"

#include <algorithm>
#include <limits>
#include <string>

namespace tide::trt
{

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

ExitRouterPlugin::ExitRouterPlugin(Fields const& fields)
    : epsilon_(fields.number("epsilon", 1e-6F, 0.0F, 1.0F))
    , threshold_(
          fields.number("threshold", 0.5F, std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()))
    , partition_(fields.integer("partition", 0, 0, 1))
    , sm_count_(fields.integer("sm_count", 0, 1, std::numeric_limits<int32_t>::max()))
{
}

std::vector<PluginField> ExitRouterPlugin::known_fields(nvinfer1::TensorRTPhase phase)
{
    std::vector<PluginField> fields{
        {"epsilon", nullptr, PluginFieldType::kFLOAT32, 1},
        {"threshold", nullptr, PluginFieldType::kFLOAT32, 1},
        {"partition", nullptr, PluginFieldType::kINT32, 1},
    };
    if (phase == nvinfer1::TensorRTPhase::kRUNTIME)
    {
        fields.emplace_back("sm_count", nullptr, PluginFieldType::kINT32, 1);
    }
    return fields;
}

std::vector<PluginField> ExitRouterPlugin::stored_fields() const
{
    return {
        {"epsilon", &epsilon_, PluginFieldType::kFLOAT32, 1},
        {"threshold", &threshold_, PluginFieldType::kFLOAT32, 1},
        {"partition", &partition_, PluginFieldType::kINT32, 1},
        {"sm_count", &sm_count_, PluginFieldType::kINT32, 1},
    };
}

int32_t ExitRouterPlugin::getNbOutputs() const noexcept
{
    return partition_ != 0 ? kPartitionOutputs : kScoreOutputs;
}

int32_t ExitRouterPlugin::getOutputDataTypes(
    DataType* output_types, int32_t output_count, DataType const*, int32_t) const noexcept
{
    return guarded(kName, [&] {
        require_count("outputs", output_count, getNbOutputs());
        std::fill(output_types, output_types + output_count, DataType::kINT32);
        output_types[kScore] = DataType::kFLOAT;
    });
}

int32_t ExitRouterPlugin::getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs,
    int32_t output_count, nvinfer1::IExprBuilder& builder) noexcept
{
    return guarded(kName, [&] {
        require_count("outputs", output_count, getNbOutputs());
        DimsExprs const& hidden = inputs[kHidden];
        outputs[kScore].nbDims = hidden.nbDims - 1;
        std::copy(hidden.d, hidden.d + hidden.nbDims - 1, outputs[kScore].d);
        if (partition_ == 0)
        {
            return;
        }
        auto const* const rows = rows_of(hidden, builder);
        auto const* const half
            = builder.operation(nvinfer1::DimensionOperation::kCEIL_DIV, *rows, *builder.constant(2)); // to tune with
        outputs[kVerdict].nbDims = outputs[kExitCount].nbDims = outputs[kContinueCount].nbDims = 0;
        outputs[kExitRows].nbDims = outputs[kContinueRows].nbDims = 1;
        outputs[kExitRows].d[0] = builder.declareSizeTensor(kExitCount, *half, *rows);
        outputs[kContinueRows].d[0] = builder.declareSizeTensor(kContinueCount, *half, *rows);
    });
}

bool ExitRouterPlugin::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* tensors, int32_t input_count, int32_t) noexcept
{
    PluginTensorDesc const& tensor = tensors[position].desc;
    switch (position)
    {
    case kHidden: return is_state_type(tensor.type) && is_linear(tensor, tensor.type);
    case kDown: return is_linear(tensor, tensors[kHidden].desc.type);
    default: return is_linear(tensor, position <= input_count + kScore ? DataType::kFLOAT : DataType::kINT32);
    }
}

void ExitRouterPlugin::check(PluginTensorDesc const* inputs, int32_t input_count, int32_t output_count) const
{
    require_count("inputs", input_count, input_count == kLayerNormInputs ? kLayerNormInputs : kRmsNormInputs);
    require_count("outputs", output_count, getNbOutputs());
    nvinfer1::Dims const& down = inputs[kDown].dims;
    require_shape("down", down, 2, -1);
    int64_t const width = down.d[0];
    int64_t const hidden_size = down.d[1];
    if (width < 1 || width > kMaxRouterWidth || hidden_size < 1 || hidden_size > std::numeric_limits<int32_t>::max())
    {
        throw PluginError(Status::kBadTensor,
            "down is [" + std::to_string(width) + ", " + std::to_string(hidden_size)
                + "]; it must be [R, H], known when the engine is built, R from 1 to " + std::to_string(kMaxRouterWidth));
    }
    require_shape("hidden", inputs[kHidden].dims, std::max(inputs[kHidden].dims.nbDims, 2), hidden_size);
    require_shape("down_bias", inputs[kDownBias].dims, 1, width);
    require_shape("up", inputs[kUp].dims, 1, width);
    require_shape("up_bias", inputs[kUpBias].dims, 1, 1);
    if (input_count == kLayerNormInputs)
    {
        require_shape("down_sum", inputs[kDownSum].dims, 1, width);
    }
}

int32_t ExitRouterPlugin::configurePlugin(
    DynamicPluginTensorDesc const* inputs, int32_t input_count, DynamicPluginTensorDesc const*, int32_t output_count) noexcept
{
    return guarded(kName, [&] {
        PluginTensorDesc descs[kLayerNormInputs]{};
        std::transform(inputs, inputs + std::min<int32_t>(input_count, kLayerNormInputs), descs,
            [](DynamicPluginTensorDesc const& tensor) { return tensor.desc; });
        check(descs, input_count, output_count);
        sm_count_ = current_sm_count();
    });
}

char const* ExitRouterPlugin::getTimingCacheID() noexcept
{
    return partition_ != 0 ? "partition" : "score"; // the other fields' numbers do not change the time
}

} // namespace tide::trt
