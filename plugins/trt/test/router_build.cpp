// TideExitRouter while an engine is built: types, shapes, refusals.

#include "checks.h"
#include "expressions.h"
#include "fake_driver.h"
#include "router_tensors.h"

using namespace tide::test;
using nvinfer1::DataType;

namespace
{

int32_t configure(nvinfer1::IPluginV3& plugin, std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs)
{
    return build(plugin).configurePlugin(
        inputs.data(), static_cast<int32_t>(inputs.size()), nullptr, build(plugin).getNbOutputs());
}

bool refuses(std::vector<nvinfer1::DynamicPluginTensorDesc> const& inputs, char const* because)
{
    PluginPtr const plugin = create_router();
    return configure(*plugin, inputs) == 2 && logged().find(because) != std::string::npos;
}

bool supports(std::vector<DataType> const& types, int32_t partition, int32_t nonlinear = -1)
{
    PluginPtr const plugin = create_router(partition);
    std::vector<nvinfer1::DynamicPluginTensorDesc> tensors;
    for (DataType const type : types)
    {
        tensors.push_back(range(type, {1}, {1}));
    }
    if (nonlinear >= 0)
    {
        tensors[static_cast<std::size_t>(nonlinear)].desc.format = nvinfer1::PluginFormat::kCHW4;
    }
    int32_t const outputs = build(*plugin).getNbOutputs();
    int32_t const inputs = static_cast<int32_t>(types.size()) - outputs;
    for (int32_t position = 0; position < inputs + outputs; ++position)
    {
        if (!build(*plugin).supportsFormatCombination(position, tensors.data(), inputs, outputs))
        {
            return false;
        }
    }
    return true;
}

constexpr DataType kF32 = DataType::kFLOAT, kI32 = DataType::kINT32;

} // namespace

TEST(router_takes_each_state_type_and_mixes_none)
{
    for (DataType const type : {DataType::kFLOAT, DataType::kHALF, DataType::kBF16})
    {
        CHECK(supports({type, type, kF32, kF32, kF32, kF32}, 0));
        CHECK(supports({type, type, kF32, kF32, kF32, kF32, kF32}, 0)); // with down_sum
        CHECK(supports({type, type, kF32, kF32, kF32, kF32, kI32, kI32, kI32, kI32, kI32}, 1));
    }
    CHECK(!supports({DataType::kHALF, DataType::kFLOAT, kF32, kF32, kF32, kF32}, 0));
    CHECK(!supports({DataType::kINT8, DataType::kINT8, kF32, kF32, kF32, kF32}, 0));
    CHECK(!supports({kF32, kF32, DataType::kHALF, kF32, kF32, kF32}, 0));
    CHECK(!supports({kF32, kF32, kF32, kF32, kF32, DataType::kHALF}, 0));
    CHECK(!supports({kF32, kF32, kF32, kF32, kF32, kF32, kI32, kF32, kI32, kI32, kI32}, 1));
    for (int32_t position = 0; position < 6; ++position)
    {
        CHECK(!supports({kF32, kF32, kF32, kF32, kF32, kF32}, 0, position));
    }
}

TEST(router_scores_have_the_shape_of_the_tokens)
{
    Expressions expressions;
    std::vector<nvinfer1::DimsExprs> const inputs{expressions.dims({3, 7, 4096}), expressions.dims({128, 4096}),
        expressions.dims({128}), expressions.dims({128}), expressions.dims({1})};
    PluginPtr const plugin = create_router();
    CHECK(build(*plugin).getNbOutputs() == 1);
    nvinfer1::DimsExprs score{};
    CHECK(build(*plugin).getOutputShapes(inputs.data(), 5, nullptr, 0, &score, 1, expressions) == 0);
    CHECK(score.nbDims == 2 && score.d[0] == inputs[0].d[0] && score.d[1] == inputs[0].d[1]);
    DataType type{};
    CHECK(build(*plugin).getOutputDataTypes(&type, 1, nullptr, 0) == 0 && type == DataType::kFLOAT);
    CHECK(build(*plugin).getOutputShapes(inputs.data(), 5, nullptr, 0, &score, 2, expressions) == 2);
    logged();
}

TEST(router_lists_have_as_many_rows_as_the_counts_say)
{
    Expressions expressions;
    nvinfer1::DimsExprs const hidden = expressions.dims({3, 7, 4096});
    PluginPtr const plugin = create_router(1);
    nvinfer1::DimsExprs outputs[6]{};
    CHECK(build(*plugin).getNbOutputs() == 6);
    CHECK(build(*plugin).getOutputShapes(&hidden, 5, nullptr, 0, outputs, 6, expressions) == 0);
    for (auto const& [list, count] : {std::pair{2, 4}, std::pair{3, 5}})
    {
        CHECK(outputs[list].nbDims == 1 && outputs[count].nbDims == 0);
        Number const& length = number(outputs[list].d[0]);
        CHECK(length.size_tensor == count && length.upper == 21 && length.value == 11);
    }
    CHECK(outputs[1].nbDims == 0);
    DataType types[6]{};
    CHECK(build(*plugin).getOutputDataTypes(types, 6, nullptr, 0) == 0);
    CHECK(types[0] == DataType::kFLOAT);
    for (int i = 1; i < 6; ++i)
    {
        CHECK(types[i] == DataType::kINT32); // size tensors must be
    }
}

TEST(router_refuses_tensors_it_would_read_beyond)
{
    fake_driver() = {};
    PluginPtr const plugin = create_router();
    CHECK(configure(*plugin, router_ranges(4, 32, DataType::kHALF)) == 0);
    CHECK(refuses(router_ranges(4, 32, DataType::kHALF, 257), "down is [257, 4096]"));
    for (std::size_t input = 0; input < 5; ++input)
    {
        auto ranges = router_ranges(4, 32, DataType::kHALF);
        auto& dims = ranges[input].desc.dims;
        dims.d[dims.nbDims - 1] = 64;
        char const* const names[] = {"hidden", "hidden", "down_bias", "up", "up_bias"}; // down's H is what the others must have
        CHECK(refuses(ranges, names[input]));
    }
    auto four = router_ranges(4, 32, DataType::kHALF);
    four.pop_back();
    CHECK(refuses(four, "got 4 inputs"));
    auto flat = router_ranges(4, 32, DataType::kHALF);
    flat[0].desc.dims.nbDims = 1;
    CHECK(refuses(flat, "hidden has 1 dimensions"));
}

TEST(a_timing_cache_tells_the_two_forms_apart)
{
    PluginPtr const score = create_router(0), partition = create_router(1);
    CHECK(std::string(build(*score).getTimingCacheID()) != build(*partition).getTimingCacheID());
}
