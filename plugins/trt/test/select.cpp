// TideExitSelect's whole life.

#include "checks.h"
#include "expressions.h"
#include "fake_driver.h"
#include "plugin_library.h"

#include <exit_select_plan.h>

using namespace tide::test;
using nvinfer1::DataType;

namespace
{

std::vector<nvinfer1::PluginTensorDesc> select_inputs(DataType type, int64_t rows, int64_t exits)
{
    return {tensor(type, {rows, 512}), tensor(type, {rows, 512}), tensor(DataType::kINT32, {exits}),
        tensor(DataType::kINT32, {rows - exits}), tensor(DataType::kINT32, {}), tensor(DataType::kINT32, {})};
}

int32_t change_shape(nvinfer1::IPluginV3& plugin, std::vector<nvinfer1::PluginTensorDesc> const& inputs)
{
    return runtime(plugin).onShapeChange(inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, 2);
}

} // namespace

TEST(select_outputs_are_as_long_as_the_lists)
{
    Expressions expressions;
    std::vector<nvinfer1::DimsExprs> const inputs{expressions.dims({3, 7, 512}), expressions.dims({3, 7, 512}),
        expressions.dims({5}), expressions.dims({16}), expressions.dims({}), expressions.dims({})};
    PluginPtr const plugin = create("TideExitSelect");
    nvinfer1::DimsExprs outputs[2]{};
    CHECK(build(*plugin).getNbOutputs() == 2);
    CHECK(build(*plugin).getOutputShapes(inputs.data(), 6, nullptr, 0, outputs, 2, expressions) == 0);
    CHECK(outputs[0].nbDims == 2 && number(outputs[0].d[0]).value == 16 && number(outputs[0].d[1]).value == 512);
    CHECK(outputs[1].nbDims == 2 && number(outputs[1].d[0]).value == 5 && number(outputs[1].d[1]).value == 512);
    DataType types[2]{};
    DataType const given[6] = {DataType::kBF16};
    CHECK(build(*plugin).getOutputDataTypes(types, 2, given, 6) == 0);
    CHECK(types[0] == DataType::kBF16 && types[1] == DataType::kBF16);
}

TEST(select_moves_rows_of_one_type)
{
    PluginPtr const plugin = create("TideExitSelect");
    for (DataType const type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16})
    {
        std::vector<DataType> const good{
            type, type, DataType::kINT32, DataType::kINT32, DataType::kINT32, DataType::kINT32, type, type};
        for (int32_t wrong = -1; wrong < 8; ++wrong)
        {
            std::vector<nvinfer1::DynamicPluginTensorDesc> tensors;
            for (DataType const each : good)
            {
                tensors.push_back(range(each, {1}, {1}));
            }
            if (wrong >= 0)
            {
                tensors[static_cast<std::size_t>(wrong)].desc.type = DataType::kINT64;
            }
            bool all = true;
            for (int32_t position = 0; position < 8; ++position)
            {
                all = all && build(*plugin).supportsFormatCombination(position, tensors.data(), 6, 2);
            }
            CHECK(all == (wrong < 0));
        }
    }
}

TEST(select_launches_with_lists_and_counts)
{
    fake_driver() = {};
    PluginPtr const built = create("TideExitSelect");
    PluginPtr const loaded(creator("TideExitSelect")
                               .createPlugin("a layer", runtime(*built).getFieldsToSerialize(), nvinfer1::TensorRTPhase::kRUNTIME));
    PluginPtr const plugin(runtime(*loaded).attachToContext(nullptr));
    auto const descs = select_inputs(DataType::kHALF, 9, 4);
    void const* inputs[6];
    void* outputs[2];
    for (std::uintptr_t i = 0; i < 8; ++i)
    {
        (i < 6 ? const_cast<void*&>(inputs[i]) : outputs[i - 6]) = reinterpret_cast<void*>(0x100 * (i + 1));
    }
    auto* const stream = reinterpret_cast<cudaStream_t>(0x2000);
    CHECK(runtime(*plugin).enqueue(descs.data(), nullptr, inputs, outputs, nullptr, stream) == 3); // not told its shapes
    CHECK(change_shape(*plugin, descs) == 0);
    fake_driver().capturing = true;
    CHECK(runtime(*plugin).enqueue(descs.data(), nullptr, inputs, outputs, nullptr, stream) == 0);
    CHECK(fake_driver().launches.size() == 1 && fake_driver().clears.empty());
    Launch const& launch = fake_driver().launches[0];
    CHECK(launch.function == std::string("tide_exit_select_f16") && launch.stream == stream);
    auto const plan = tide::plan_exit_select(9, 512, 2, false);
    CHECK(launch.grid[0] == plan.grid[0] && launch.grid[1] == plan.grid[1] && launch.block[0] == plan.block[0]);
    auto const& params = launch.as<tide::exit_select_params>();
    CHECK(params.hidden == inputs[0] && params.exit_states == inputs[1] && params.exit_rows == inputs[2]);
    CHECK(params.continue_rows == inputs[3] && params.exit_count == inputs[4] && params.continue_count == inputs[5]);
    CHECK(params.continue_hidden == outputs[0] && params.head_input == outputs[1] && params.origin == nullptr);
    CHECK(params.rows == 9 && params.hidden_size == 512 && params.hidden_stride == 512 && params.exit_stride == 512);
    CHECK(params.continue_stride == 512 && params.head_stride == 512 && params.continue_origin == nullptr);
    logged();
}

TEST(select_refuses_tensors_it_would_read_beyond)
{
    fake_driver() = {};
    PluginPtr const plugin = create("TideExitSelect");
    auto narrow = select_inputs(DataType::kHALF, 9, 4);
    narrow[1].dims.d[1] = 256;
    CHECK(change_shape(*plugin, narrow) == 2 && logged().find("exit_states") != std::string::npos);
    auto counts = select_inputs(DataType::kHALF, 9, 4);
    counts[4].dims.nbDims = 1;
    CHECK(change_shape(*plugin, counts) == 2 && logged().find("exit_count") != std::string::npos);
    counts.pop_back();
    CHECK(change_shape(*plugin, counts) == 2 && logged().find("got 5 inputs") != std::string::npos);
}
