// TideExitRouter: which tokens may stop here (csrc/exit_router.cuh inside a TensorRT engine).
//
//   inputs    hidden [..., H] T, down [R, H] T, down_bias [R], up [R], up_bias [1]; for LayerNorm also down_sum [R]: the sums
//             of down's rows (without it: RMSNorm). T is fp32, fp16 or bf16, everything else fp32; R <= 256.
//   outputs   score [...] fp32: sigmoid(up . silu(down norm(hidden) + down_bias) + up_bias)
//             and with partition = 1, N being the rows of hidden, all int32:
//             verdict []: 0 all rows exit, 1 some do, 2 none does
//             exit_rows [E], continue_rows [C], ascending; exit_count [] = E, continue_count [] = C = N - E (size tensors)
//   fields    epsilon (1e-6), threshold (0.5; a row exits iff score >= threshold, a NaN never), partition (0)
//
// Shapes that depend on data keep an engine from being captured in a CUDA graph, hence partition = 0 by default.
#pragma once

#include "cuda_driver.h"
#include "plugin.h"

#include <exit_router_plan.h>

namespace tide::trt
{

class Workspace;

enum RouterInput : int32_t
{
    kHidden,
    kDown,
    kDownBias,
    kUp,
    kUpBias,
    kDownSum,
    kLayerNormInputs,
    kRmsNormInputs = kDownSum,
};

enum RouterOutput : int32_t
{
    kScore,
    kVerdict,
    kExitRows,
    kContinueRows,
    kExitCount,
    kContinueCount,
    kPartitionOutputs,
    kScoreOutputs = kVerdict,
};

class ExitRouterPlugin final : public PluginV3<ExitRouterPlugin>
{
public:
    static constexpr char const* kName = "TideExitRouter";

    explicit ExitRouterPlugin(Fields const& fields);

    static std::vector<nvinfer1::PluginField> known_fields(nvinfer1::TensorRTPhase phase);
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
    std::size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t output_count) const noexcept override;
    char const* getTimingCacheID() noexcept override;
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count,
        nvinfer1::PluginTensorDesc const* outputs, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_descs, nvinfer1::PluginTensorDesc const* output_descs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;

private:
    void check(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count, int32_t output_count) const;
    RouterPlan plan(int32_t rows, nvinfer1::PluginTensorDesc const& down) const noexcept;
    void place_scratch(exit_router_params& params, RouterPlan const& plan, Workspace& workspace) const noexcept;
    void place_tensors(exit_router_params& params, void const* const* inputs, void* const* outputs) const noexcept;

    float epsilon_;
    float threshold_;
    int32_t partition_;
    int32_t sm_count_;         // of the GPU that the engine was built on: its workspace was measured for plans of that size
    int32_t input_count_ = 0;  // 5, or 6 with down_sum; TensorRT says so before every enqueue
    CUfunction decode_ = nullptr;
    CUfunction tiled_ = nullptr;
};

} // namespace tide::trt
