// TideExitSelect: sorts rows into those that go deeper and those that go to the head (csrc/exit_select.cuh in an engine).
//
//   inputs    hidden [..., H] T; exit_states [..., H] T, what an exited row hands to the head (hidden itself, or translated);
//             exit_rows [E], continue_rows [C], exit_count [], continue_count [] int32, as TideExitRouter with partition = 1
//             gives them. T is fp32, fp16 or bf16. Lists longer than their counts are allowed: the rows beyond stay unwritten.
//   outputs   continue_hidden [C, H] T, row i being hidden's row continue_rows[i]
//             head_input [E, H] T, row i being exit_states' row exit_rows[i]
#pragma once

#include "cuda_driver.h"
#include "plugin.h"

namespace tide::trt
{

class ExitSelectPlugin final : public PluginV3<ExitSelectPlugin>
{
public:
    static constexpr char const* kName = "TideExitSelect";

    explicit ExitSelectPlugin(Fields const&) {}

    static std::vector<nvinfer1::PluginField> known_fields(nvinfer1::TensorRTPhase);
    std::vector<nvinfer1::PluginField> stored_fields() const;

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count, nvinfer1::DataType const* input_types,
        int32_t input_count) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count, nvinfer1::DimsExprs const* shape_inputs,
        int32_t shape_input_count, nvinfer1::DimsExprs* outputs, int32_t output_count,
        nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t input_count,
        int32_t output_count) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    char const* getTimingCacheID() noexcept override;
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::PluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

private:
    CUfunction select_ = nullptr;
};

} // namespace tide::trt
