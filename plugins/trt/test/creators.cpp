// The creators: names, fields, refusals, threads, and what an engine stores.

#include "checks.h"
#include "plugin_library.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

using namespace tide::test;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

namespace
{

// A refused layer must tell the user which field is wrong, not only fail.
bool refuses(std::vector<PluginField> const& fields, char const* because)
{
    PluginPtr const plugin = create("TideExitRouter", fields);
    return plugin == nullptr && logged().find(because) != std::string::npos;
}

std::string stored(nvinfer1::IPluginV3& plugin)
{
    auto const* const fields = runtime(plugin).getFieldsToSerialize();
    std::string text;
    for (int32_t i = 0; i < fields->nbFields; ++i)
    {
        int32_t bits = 0; // every field is 32 bits wide
        std::memcpy(&bits, fields->fields[i].data, sizeof(bits));
        text += std::string(fields->fields[i].name) + "=" + std::to_string(bits) + " ";
    }
    return text;
}

} // namespace

TEST(creators_are_found_under_their_names)
{
    CHECK(creators().size() == 2);
    for (char const* name : {"TideExitRouter", "TideExitSelect"})
    {
        auto& found = creator(name);
        CHECK(std::strcmp(found.getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0);
        CHECK(std::strcmp(found.getPluginNamespace(), "tide") == 0 && std::strcmp(found.getPluginVersion(), "1") == 0);
        PluginPtr const plugin = create(name);
        CHECK(std::strcmp(core(*plugin).getPluginName(), name) == 0);
        CHECK(std::strcmp(core(*plugin).getPluginNamespace(), "tide") == 0);
        CHECK(std::strcmp(core(*plugin).getPluginVersion(), "1") == 0);
    }
}

TEST(an_onnx_parser_is_told_the_attributes_to_pass_on)
{
    auto const* const fields = creator("TideExitRouter").getFieldNames();
    CHECK(fields->nbFields == 3);
    CHECK(std::strcmp(fields->fields[0].name, "epsilon") == 0 && fields->fields[0].type == PluginFieldType::kFLOAT32);
    CHECK(std::strcmp(fields->fields[1].name, "threshold") == 0 && fields->fields[1].type == PluginFieldType::kFLOAT32);
    CHECK(std::strcmp(fields->fields[2].name, "partition") == 0 && fields->fields[2].type == PluginFieldType::kINT32);
    CHECK(creator("TideExitSelect").getFieldNames()->nbFields == 0);
}

TEST(fields_that_cannot_be_meant_are_refused_by_name)
{
    float const half = 0.5F, nan = std::numeric_limits<float>::quiet_NaN();
    int32_t const two = 2;
    CHECK(refuses({{"treshold", &half, PluginFieldType::kFLOAT32, 1}}, "treshold is unknown"));
    CHECK(refuses({{"epsilon", &nan, PluginFieldType::kFLOAT32, 1}}, "epsilon is nan"));
    CHECK(refuses({{"partition", &two, PluginFieldType::kINT32, 1}}, "partition is 2"));
    CHECK(refuses({{"partition", &half, PluginFieldType::kFLOAT32, 1}}, "partition has PluginFieldType 1"));
    CHECK(refuses({{"epsilon", nullptr, PluginFieldType::kFLOAT32, 1}}, "epsilon must hold one value"));
    CHECK(refuses({{"epsilon", &half, PluginFieldType::kFLOAT32, 2}}, "epsilon must hold one value"));
    PluginField const threshold{"threshold", &half, PluginFieldType::kFLOAT32, 1};
    CHECK(refuses({threshold, threshold}, "threshold is given twice"));
    CHECK(refuses({{"sm_count", &two, PluginFieldType::kINT32, 1}}, "sm_count is unknown")); // the engine's, not the user's
}

TEST(wide_numbers_are_taken_too)
{
    int64_t const one = 1, many = int64_t(1) << 32;
    double const half = 0.5;
    PluginPtr const plugin
        = create("TideExitRouter", {{"partition", &one, PluginFieldType::kINT64, 1}, {"threshold", &half, PluginFieldType::kFLOAT64, 1}});
    CHECK(plugin != nullptr && build(*plugin).getNbOutputs() == 6);
    CHECK(refuses({{"partition", &many, PluginFieldType::kINT64, 1}}, "partition is 4294967296"));
}

TEST(a_loaded_engine_has_the_plugin_that_was_stored)
{
    float const epsilon = 1e-5F, threshold = 0.75F;
    int32_t const partition = 1, sm_count = 132;
    PluginPtr built = create("TideExitRouter",
        {{"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1}, {"threshold", &threshold, PluginFieldType::kFLOAT32, 1},
            {"partition", &partition, PluginFieldType::kINT32, 1}, {"sm_count", &sm_count, PluginFieldType::kINT32, 1}},
        TensorRTPhase::kRUNTIME);
    std::string const expected = stored(*built);
    CHECK(expected.find("sm_count=132 ") != std::string::npos && expected.find("partition=1 ") != std::string::npos);
    auto const& creator_ = creator("TideExitRouter");
    PluginPtr const loaded(const_cast<nvinfer1::IPluginCreatorV3One&>(creator_).createPlugin(
        "a layer", runtime(*built).getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    CHECK(loaded != nullptr && stored(*loaded) == expected);
    PluginPtr const clone(built->clone());
    PluginPtr const attached(runtime(*clone).attachToContext(nullptr));
    built.reset(); // a clone that still points into it reads freed memory here
    CHECK(stored(*clone) == expected && stored(*attached) == expected);
    CHECK(build(*attached).getNbOutputs() == 6);
}

TEST(creators_serve_many_threads)
{
    std::atomic<int> made{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 8; ++thread)
    {
        threads.emplace_back([&made, thread] {
            for (int i = 0; i < 200; ++i)
            {
                float const threshold = 0.001F * static_cast<float>(thread * 200 + i);
                PluginPtr const plugin
                    = create("TideExitRouter", {{"threshold", &threshold, PluginFieldType::kFLOAT32, 1}});
                PluginPtr const clone(plugin->clone());
                made += stored(*clone) == stored(*plugin) ? 1 : 0;
                create("TideExitRouter", {{"wrong", &threshold, PluginFieldType::kFLOAT32, 1}}); // logs from every thread
            }
        });
    }
    for (auto& thread : threads)
    {
        thread.join();
    }
    CHECK(made == 8 * 200);
    logged();
}
