#include "exit_select.h"

#include "kernel_launch.h"
#include "tensors.h"

#include <exit_select_plan.h>

#include <algorithm>
#include <string>

namespace tide::trt
{
namespace
{

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

enum Input : int32_t
{
    kHidden,
    kExitStates,
    kExitRows,
    kContinueRows,
    kExitCount,
    kContinueCount,
    kInputs,
};

enum Output : int32_t
{
    kContinueHidden,
    kHeadInput,
    kOutputs,
};

void check(Dims const* dims, int32_t input_count, int32_t output_count)
{
    require_count("inputs", input_count, kInputs);
    require_count("outputs", output_count, kOutputs);
    Dims const& hidden = dims[kHidden];
    require_shape("hidden", hidden, std::max(hidden.nbDims, 2), -1);
    require_shape("exit_states", dims[kExitStates], hidden.nbDims, hidden.d[hidden.nbDims - 1]);
    require_shape("exit_rows", dims[kExitRows], 1, -1);
    require_shape("continue_rows", dims[kContinueRows], 1, -1);
    require_shape("exit_count", dims[kExitCount], 0, -1);
    require_shape("continue_count", dims[kContinueCount], 0, -1);
}

} // namespace

std::vector<nvinfer1::PluginField> ExitSelectPlugin::known_fields(nvinfer1::TensorRTPhase)
{
    return {};
}

std::vector<nvinfer1::PluginField> ExitSelectPlugin::stored_fields() const
{
    return {};
}

int32_t ExitSelectPlugin::getNbOutputs() const noexcept
{
    return kOutputs;
}

int32_t ExitSelectPlugin::getOutputDataTypes(
    DataType* output_types, int32_t output_count, DataType const* input_types, int32_t) const noexcept
{
    std::fill(output_types, output_types + output_count, input_types[kHidden]);
    return static_cast<int32_t>(Status::kOk);
}

int32_t ExitSelectPlugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
    DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder&) noexcept
{
    return guarded(kName, [&] {
        require_count("inputs", input_count, kInputs);
        require_count("outputs", output_count, kOutputs);
        auto const* const hidden_size = inputs[kHidden].d[inputs[kHidden].nbDims - 1];
        outputs[kContinueHidden].nbDims = outputs[kHeadInput].nbDims = 2;
        outputs[kContinueHidden].d[0] = inputs[kContinueRows].d[0];
        outputs[kHeadInput].d[0] = inputs[kExitRows].d[0];
        outputs[kContinueHidden].d[1] = outputs[kHeadInput].d[1] = hidden_size;
    });
}

bool ExitSelectPlugin::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* tensors, int32_t, int32_t) noexcept
{
    PluginTensorDesc const& tensor = tensors[position].desc;
    switch (position)
    {
    case kHidden: return is_state_type(tensor.type) && is_linear(tensor, tensor.type);
    case kExitRows:
    case kContinueRows:
    case kExitCount:
    case kContinueCount: return is_linear(tensor, DataType::kINT32);
    default: return is_linear(tensor, tensors[kHidden].desc.type);
    }
}

int32_t ExitSelectPlugin::configurePlugin(
    DynamicPluginTensorDesc const* inputs, int32_t input_count, DynamicPluginTensorDesc const*, int32_t output_count) noexcept
{
    return guarded(kName, [&] {
        Dims dims[kInputs]{};
        std::transform(inputs, inputs + std::min<int32_t>(input_count, kInputs), dims,
            [](DynamicPluginTensorDesc const& tensor) { return tensor.desc.dims; });
        check(dims, input_count, output_count);
    });
}

char const* ExitSelectPlugin::getTimingCacheID() noexcept
{
    return "";
}

int32_t ExitSelectPlugin::onShapeChange(
    PluginTensorDesc const* inputs, int32_t input_count, PluginTensorDesc const*, int32_t output_count) noexcept
{
    return guarded(kName, [&] {
        Dims dims[kInputs]{};
        std::transform(inputs, inputs + std::min<int32_t>(input_count, kInputs), dims,
            [](PluginTensorDesc const& tensor) { return tensor.dims; });
        check(dims, input_count, output_count);
        select_ = load_function("exit_select", std::string("tide_exit_select_") + type_suffix(inputs[kHidden].type), 0);
    });
}

int32_t ExitSelectPlugin::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void*, cudaStream_t stream) noexcept
{
    return guarded(kName, [&] {
        if (select_ == nullptr)
        {
            throw PluginError(Status::kNotReady, "enqueue was called before onShapeChange");
        }
        Dims const& dims = input_descs[kHidden].dims;
        exit_select_params params{};
        params.hidden = inputs[kHidden];
        params.exit_states = inputs[kExitStates];
        params.exit_rows = static_cast<int32_t const*>(inputs[kExitRows]);
        params.continue_rows = static_cast<int32_t const*>(inputs[kContinueRows]);
        params.exit_count = static_cast<int32_t const*>(inputs[kExitCount]);
        params.continue_count = static_cast<int32_t const*>(inputs[kContinueCount]);
        params.continue_hidden = outputs[kContinueHidden];
        params.head_input = outputs[kHeadInput];
        params.rows = rows_of(dims);
        params.hidden_size = static_cast<int32_t>(dims.d[dims.nbDims - 1]);
        params.hidden_stride = params.exit_stride = params.hidden_size;
        params.continue_stride = params.head_stride = params.hidden_size;
        bool const in_place = false;
        launch(select_, plan_exit_select(params.rows, params.hidden_size, element_bytes(input_descs[kHidden].type), in_place),
            &params, stream);
    });
}

} // namespace tide::trt
