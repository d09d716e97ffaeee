// TideExitRouter per inference: workspace, launch plan, launch.

#include "exit_router.h"

#include "kernel_launch.h"
#include "tensors.h"
#include "workspace.h"

#include <algorithm>
#include <limits>
#include <string>

namespace tide::trt
{

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

RouterPlan ExitRouterPlugin::plan(int32_t rows, PluginTensorDesc const& down) const noexcept
{
    return plan_exit_router(rows, static_cast<int32_t>(down.dims.d[1]), static_cast<int32_t>(down.dims.d[0]),
        element_bytes(down.type), sm_count_);
}

void ExitRouterPlugin::place_scratch(
    exit_router_params& params, RouterPlan const& plan, Workspace& workspace) const noexcept
{
    auto const rows = static_cast<std::size_t>(params.rows);
    params.counters = workspace.take<uint32_t>(plan.launch.counters);
    params.workspace
        = reinterpret_cast<float*>(workspace.take<char>(static_cast<std::size_t>(plan.launch.workspace_bytes)));
    params.exits = workspace.take<uint8_t>(rows); // TensorRT takes no booleans from a plugin
    if (partition_ == 0)
    {
        params.exit_rows = workspace.take<int32_t>(rows);
        params.continue_rows = workspace.take<int32_t>(rows);
        params.verdict = workspace.take<int32_t>(1);
        params.exit_count = workspace.take<int32_t>(1);
        params.continue_count = workspace.take<int32_t>(1);
    }
}

void ExitRouterPlugin::place_tensors(
    exit_router_params& params, void const* const* inputs, void* const* outputs) const noexcept
{
    params.hidden = inputs[kHidden];
    params.down = inputs[kDown];
    params.down_bias = static_cast<float const*>(inputs[kDownBias]);
    params.up = static_cast<float const*>(inputs[kUp]);
    params.up_bias = static_cast<float const*>(inputs[kUpBias]);
    params.down_sum = input_count_ == kLayerNormInputs ? static_cast<float const*>(inputs[kDownSum]) : nullptr;
    params.score = static_cast<float*>(outputs[kScore]);
    if (partition_ != 0)
    {
        params.verdict = static_cast<int32_t*>(outputs[kVerdict]);
        params.exit_rows = static_cast<int32_t*>(outputs[kExitRows]);
        params.continue_rows = static_cast<int32_t*>(outputs[kContinueRows]);
        params.exit_count = static_cast<int32_t*>(outputs[kExitCount]);
        params.continue_count = static_cast<int32_t*>(outputs[kContinueCount]);
    }
}

std::size_t ExitRouterPlugin::getWorkspaceSize(
    DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept
{
    std::size_t most = 0;
    guarded(kName, [&] {
        int32_t const most_rows = rows_of(inputs[kHidden].max);
        // More rows may take less, being split over fewer chunks of H; so every number of groups of rows is asked.
        exit_router_params params{};
        for (int32_t groups = 0; groups <= most_rows / kGroupRows; ++groups)
        {
            params.rows = std::min((groups + 1) * kGroupRows, most_rows);
            Workspace workspace;
            place_scratch(params, plan(params.rows, inputs[kDown].desc), workspace);
            most = std::max(most, workspace.bytes());
        }
    });
    return most;
}

int32_t ExitRouterPlugin::onShapeChange(
    PluginTensorDesc const* inputs, int32_t input_count, PluginTensorDesc const*, int32_t output_count) noexcept
{
    return guarded(kName, [&] {
        check(inputs, input_count, output_count);
        input_count_ = input_count;
        std::string const suffix = type_suffix(inputs[kHidden].type);
        decode_ = load_function("exit_router", "tide_exit_router_" + suffix, plan(1, inputs[kDown]).launch.shared_bytes);
        // Few rows have small tiles with another number of stages than many rows.
        tiled_ = load_function("exit_router", "tide_exit_router_tiled_" + suffix,
            std::max(plan(kMostDecodeRows + 1, inputs[kDown]).launch.shared_bytes,
                plan(std::numeric_limits<int32_t>::max(), inputs[kDown]).launch.shared_bytes));
    });
}

int32_t ExitRouterPlugin::enqueue(PluginTensorDesc const* input_descs, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void* memory, cudaStream_t stream) noexcept
{
    return guarded(kName, [&] {
        if (memory == nullptr || tiled_ == nullptr)
        {
            throw PluginError(Status::kNotReady, "enqueue was called without workspace, or before onShapeChange");
        }
        PluginTensorDesc const& down = input_descs[kDown];
        exit_router_params params{};
        params.rows = rows_of(input_descs[kHidden].dims);
        RouterPlan const launch_plan = plan(params.rows, down);
        params.width = static_cast<int32_t>(down.dims.d[0]);
        params.hidden_size = static_cast<int32_t>(down.dims.d[1]);
        params.row_stride = params.hidden_size;
        params.chunk = launch_plan.chunk;
        params.tile_rows = launch_plan.tile_rows;
        params.threshold = threshold_;
        params.epsilon = epsilon_;
        Workspace workspace(memory);
        place_scratch(params, launch_plan, workspace);
        place_tensors(params, inputs, outputs);
        // The workspace comes with anything in it, and layers may share it: the counters are zeroed every time.
        clear(params.counters, launch_plan.launch.counters, stream);
        launch(launch_plan.tile_rows > 0 ? tiled_ : decode_, launch_plan.launch, &params, stream);
    });
}

} // namespace tide::trt
