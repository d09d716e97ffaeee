// TideExitRouter while an engine runs: what it launches, with what, and what it must not do between.

#include "checks.h"
#include "fake_driver.h"
#include "router_tensors.h"

#include <exit_router_plan.h>

#include <cstdlib>
#include <new>

namespace
{
std::size_t allocations = 0;
} // namespace

// The library's allocations come here too (the program exports these symbols).
void* operator new(std::size_t bytes)
{
    ++allocations;
    if (void* const memory = std::malloc(bytes))
    {
        return memory;
    }
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept
{
    std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept
{
    std::free(memory);
}

using namespace tide::test;
using nvinfer1::DataType;

namespace
{

auto* const kStream = reinterpret_cast<cudaStream_t>(0x2000);
auto* const kWorkspace = reinterpret_cast<char*>(0x10000000); // addresses: nothing reads or writes them here

void const* const kInputs[6] = {reinterpret_cast<void*>(0x100), reinterpret_cast<void*>(0x200), reinterpret_cast<void*>(0x300),
    reinterpret_cast<void*>(0x400), reinterpret_cast<void*>(0x500), reinterpret_cast<void*>(0x600)};
void* const kOutputs[6] = {reinterpret_cast<void*>(0x700), reinterpret_cast<void*>(0x800), reinterpret_cast<void*>(0x900),
    reinterpret_cast<void*>(0xa00), reinterpret_cast<void*>(0xb00), reinterpret_cast<void*>(0xc00)};

int32_t change_shape(nvinfer1::IPluginV3& plugin, std::vector<nvinfer1::PluginTensorDesc> const& inputs)
{
    return runtime(plugin).onShapeChange(
        inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, build(plugin).getNbOutputs());
}

int32_t enqueue(nvinfer1::IPluginV3& plugin, std::vector<nvinfer1::PluginTensorDesc> const& inputs, void* workspace = kWorkspace)
{
    return runtime(plugin).enqueue(inputs.data(), nullptr, kInputs, kOutputs, workspace, kStream);
}

//! A plugin that was configured for up to 4 x 256 rows, stored, loaded and attached to a context.
PluginPtr attached(int32_t partition, DataType type, float threshold = 0.5F, float epsilon = 1e-6F)
{
    PluginPtr const built = create_router(partition, threshold, epsilon);
    auto const ranges = router_ranges(4, 256, type);
    CHECK(build(*built).configurePlugin(ranges.data(), 5, nullptr, build(*built).getNbOutputs()) == 0);
    PluginPtr const loaded(creator("TideExitRouter")
                               .createPlugin("a layer", runtime(*built).getFieldsToSerialize(), nvinfer1::TensorRTPhase::kRUNTIME));
    return PluginPtr(runtime(*loaded).attachToContext(nullptr));
}

} // namespace

TEST(router_launches_the_kernel_of_its_type_and_size)
{
    for (auto const& [type, suffix] :
        {std::pair{DataType::kFLOAT, "f32"}, std::pair{DataType::kHALF, "f16"}, std::pair{DataType::kBF16, "bf16"}})
    {
        for (int64_t const tokens : {1, 32, 33, 256})
        {
            fake_driver() = {};
            PluginPtr const plugin = attached(0, type, 0.625F, 1e-5F);
            auto const inputs = router_inputs({4, tokens}, type);
            CHECK(change_shape(*plugin, inputs) == 0 && enqueue(*plugin, inputs) == 0);
            CHECK(fake_driver().launches.size() == 1);
            Launch const& launch = fake_driver().launches[0];
            bool const tiled = 4 * tokens > tide::kMostDecodeRows;
            CHECK(launch.function == std::string("tide_exit_router_") + (tiled ? "tiled_" : "") + suffix);
            auto const plan = tide::plan_exit_router(4 * tokens, kHiddenSize, kWidth, type == DataType::kFLOAT ? 4 : 2, 108);
            for (int axis = 0; axis < 3; ++axis)
            {
                CHECK(launch.grid[axis] == plan.launch.grid[axis] && launch.block[axis] == plan.launch.block[axis]);
            }
            CHECK(launch.shared_bytes == plan.launch.shared_bytes && launch.stream == kStream);
            CHECK(launch.shared_bytes <= 48 * 1024
                || fake_driver().shared_limit[launch.function] >= static_cast<int>(launch.shared_bytes));
            auto const& params = launch.as<tide::exit_router_params>();
            CHECK(params.rows == 4 * tokens && params.hidden_size == kHiddenSize && params.width == kWidth);
            CHECK(params.row_stride == kHiddenSize && params.chunk == plan.chunk && params.row_count == nullptr);
            CHECK(params.tile_rows == plan.tile_rows);
            CHECK(params.threshold == 0.625F && params.epsilon == 1e-5F && params.sets_condition == 0);
        }
    }
}

TEST(router_passes_every_tensor_to_its_place)
{
    for (bool const layer_norm : {false, true})
    {
        fake_driver() = {};
        PluginPtr const plugin = attached(1, DataType::kHALF);
        auto const inputs = router_inputs({4, 8}, DataType::kHALF, layer_norm);
        CHECK(change_shape(*plugin, inputs) == 0 && enqueue(*plugin, inputs) == 0);
        auto const& params = fake_driver().launches[0].as<tide::exit_router_params>();
        CHECK(params.hidden == kInputs[0] && params.down == kInputs[1] && params.down_bias == kInputs[2]);
        CHECK(params.up == kInputs[3] && params.up_bias == kInputs[4]);
        CHECK(params.down_sum == (layer_norm ? kInputs[5] : nullptr));
        CHECK(params.score == kOutputs[0] && params.verdict == kOutputs[1] && params.exit_rows == kOutputs[2]);
        CHECK(params.continue_rows == kOutputs[3] && params.exit_count == kOutputs[4] && params.continue_count == kOutputs[5]);
    }
}

TEST(router_stays_inside_its_workspace_whatever_the_rows)
{
    for (int32_t const partition : {0, 1})
    {
        fake_driver() = {};
        PluginPtr const plugin = attached(partition, DataType::kBF16);
        auto const ranges = router_ranges(4, 256, DataType::kBF16);
        std::size_t const lent = build(*plugin).getWorkspaceSize(ranges.data(), 5, nullptr, build(*plugin).getNbOutputs());
        CHECK(change_shape(*plugin, router_inputs({4, 256}, DataType::kBF16)) == 0);
        for (int64_t rows = 0; rows <= 4 * 256; ++rows)
        {
            fake_driver().launches.clear();
            fake_driver().clears.clear();
            CHECK(enqueue(*plugin, router_inputs({rows}, DataType::kBF16)) == 0);
            CHECK(fake_driver().launches.size() == 1 && fake_driver().clears.size() == 1);
            auto const& params = fake_driver().launches[0].as<tide::exit_router_params>();
            auto const plan = tide::plan_exit_router(rows, kHiddenSize, kWidth, 2, 108);
            Clear const& clear = fake_driver().clears[0];
            CHECK(clear.address == reinterpret_cast<std::uintptr_t>(params.counters));
            CHECK(clear.bytes == plan.launch.counters * sizeof(uint32_t) && clear.before_launch == 0 && clear.stream == kStream);
            struct
            {
                void const* start;
                std::size_t bytes;
            } const pieces[] = {{params.counters, clear.bytes},
                {params.workspace, static_cast<std::size_t>(plan.launch.workspace_bytes)},
                {params.exits, static_cast<std::size_t>(rows)},
                {partition ? nullptr : params.exit_rows, static_cast<std::size_t>(rows) * 4},
                {partition ? nullptr : params.continue_rows, static_cast<std::size_t>(rows) * 4},
                {partition ? nullptr : params.verdict, 4}, {partition ? nullptr : params.exit_count, 4},
                {partition ? nullptr : params.continue_count, 4}};
            char const* end = kWorkspace;
            for (auto const& piece : pieces)
            {
                if (piece.start != nullptr)
                {
                    auto const* const start = static_cast<char const*>(piece.start);
                    CHECK(start >= end && (start - kWorkspace) % 256 == 0); // in order: none overlaps the one before
                    end = start + piece.bytes;
                }
            }
            CHECK(end <= kWorkspace + lent);
        }
    }
}

TEST(router_can_be_captured)
{
    fake_driver() = {};
    PluginPtr const plugin = attached(1, DataType::kHALF);
    auto const inputs = router_inputs({4, 64}, DataType::kHALF);
    CHECK(change_shape(*plugin, inputs) == 0);
    fake_driver().launches.reserve(2);
    fake_driver().clears.reserve(2);
    CHECK(enqueue(*plugin, inputs) == 0); // TensorRT asks for one run before a capture
    fake_driver().capturing = true;
    std::size_t const before = allocations;
    int32_t const result = enqueue(*plugin, inputs);
    std::size_t const during = allocations - before;
    CHECK(result == 0 && fake_driver().launches.size() == 2 && fake_driver().clears.size() == 2);
    CHECK(during == 0);
}

TEST(router_plans_for_the_gpu_that_the_engine_was_built_for)
{
    fake_driver() = {};
    PluginPtr const plugin = attached(0, DataType::kHALF);
    fake_driver().sm_count = 16; // its workspace was measured for 108
    auto const inputs = router_inputs({4, 1}, DataType::kHALF);
    CHECK(change_shape(*plugin, inputs) == 0 && enqueue(*plugin, inputs) == 0);
    CHECK(fake_driver().launches[0].as<tide::exit_router_params>().chunk
        == tide::plan_exit_router(4, kHiddenSize, kWidth, 2, 108).chunk);
}

TEST(router_reports_what_went_wrong)
{
    fake_driver() = {};
    PluginPtr const plugin = attached(0, DataType::kHALF);
    auto const inputs = router_inputs({4, 1}, DataType::kHALF);
    CHECK(enqueue(*plugin, inputs) == 3 && logged().find("before onShapeChange") != std::string::npos);
    CHECK(change_shape(*plugin, inputs) == 0);
    CHECK(enqueue(*plugin, inputs, nullptr) == 3 && logged().find("without workspace") != std::string::npos);
    fake_driver().launch_result = CUDA_ERROR_LAUNCH_FAILED;
    CHECK(enqueue(*plugin, inputs) == 6);
    CHECK(logged() == "TideExitRouter: cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED\n");
    CHECK(enqueue(*plugin, router_inputs({1 << 20, 1 << 20}, DataType::kHALF)) == 2);
    CHECK(logged().find("too many rows") != std::string::npos);
}
