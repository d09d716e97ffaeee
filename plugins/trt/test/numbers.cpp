// Both plugins on tensors in host memory, their kernels run by tests/plugins/host_shim: what an engine would compute.

#include "checks.h"
#include "fake_driver.h"
#include "router_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <numeric>
#include <random>

using namespace tide::test;
using nvinfer1::DataType;

namespace
{

constexpr int64_t kSize = 96, kInner = 20;
constexpr float kThreshold = 0.5F;

struct Router
{
    std::vector<float> hidden, down, down_bias, up, up_bias;
};

Router random_router(std::size_t rows)
{
    std::mt19937 random(static_cast<unsigned>(rows));
    std::normal_distribution<float> normal;
    auto const make = [&](std::size_t count, float scale) {
        std::vector<float> values(count);
        std::generate(values.begin(), values.end(), [&] { return scale * normal(random); });
        return values;
    };
    return {make(rows * kSize, 3.0F), make(kInner * kSize, 0.1F), make(kInner, 1.0F), make(kInner, 1.0F), make(1, 0.1F)};
}

double sigmoid(double x)
{
    return 1.0 / (1.0 + std::exp(-x));
}

double expected_score(Router const& router, std::size_t row)
{
    float const* const states = router.hidden.data() + row * kSize;
    double squares = 0.0, total = router.up_bias[0];
    for (int64_t h = 0; h < kSize; ++h)
    {
        squares += double(states[h]) * states[h];
    }
    double const scale = 1.0 / std::sqrt(squares / kSize + 1e-6);
    for (int64_t r = 0; r < kInner; ++r)
    {
        float const* const weights = router.down.data() + r * kSize;
        double const product = std::inner_product(states, states + kSize, weights, 0.0,
            std::plus<double>(), [](double state, double weight) { return state * weight; });
        double const x = product * scale + router.down_bias[static_cast<std::size_t>(r)];
        total += x * sigmoid(x) * router.up[static_cast<std::size_t>(r)];
    }
    return sigmoid(total);
}

//! Scores, lists and counts as the plugin's outputs.
struct Routed
{
    std::vector<float> score;
    int32_t verdict = -1, exit_count = -1, continue_count = -1;
    std::vector<int32_t> exit_rows, continue_rows;
};

std::vector<nvinfer1::PluginTensorDesc> inputs_of(int64_t rows)
{
    return {tensor(DataType::kFLOAT, {rows, kSize}), tensor(DataType::kFLOAT, {kInner, kSize}),
        tensor(DataType::kFLOAT, {kInner}), tensor(DataType::kFLOAT, {kInner}), tensor(DataType::kFLOAT, {1})};
}

Routed run(Router const& router, int64_t rows)
{
    PluginPtr const plugin = create_router(1, kThreshold);
    auto const inputs = inputs_of(rows);
    std::vector<nvinfer1::DynamicPluginTensorDesc> ranges;
    for (auto const& desc : inputs)
    {
        ranges.push_back({desc, desc.dims, desc.dims, desc.dims});
    }
    CHECK(build(*plugin).configurePlugin(ranges.data(), 5, nullptr, 6) == 0);
    CHECK(runtime(*plugin).onShapeChange(inputs.data(), 5, nullptr, 6) == 0);
    std::size_t const bytes = build(*plugin).getWorkspaceSize(ranges.data(), 5, nullptr, 6);
    void* const workspace = std::aligned_alloc(256, bytes); // exactly what was asked for: a sanitizer sees what lies beyond
    std::memset(workspace, 0xff, bytes);                    // and nothing may count on zeros in it
    auto const count = static_cast<std::size_t>(rows);
    Routed routed{std::vector<float>(count), -1, -1, -1, std::vector<int32_t>(count), std::vector<int32_t>(count)};
    void const* const given[] = {
        router.hidden.data(), router.down.data(), router.down_bias.data(), router.up.data(), router.up_bias.data()};
    void* const results[] = {routed.score.data(), &routed.verdict, routed.exit_rows.data(), routed.continue_rows.data(),
        &routed.exit_count, &routed.continue_count};
    int32_t const result = runtime(*plugin).enqueue(inputs.data(), nullptr, given, results, workspace, nullptr);
    std::free(workspace);
    CHECK(result == 0);
    routed.exit_rows.resize(static_cast<std::size_t>(routed.exit_count));
    routed.continue_rows.resize(static_cast<std::size_t>(routed.continue_count));
    return routed;
}

void run_kernels_here()
{
    fake_driver() = {};
    void* const kernels = dlopen(TIDE_HOST_KERNELS, RTLD_NOW | RTLD_LOCAL);
    CHECK(kernels != nullptr);
    fake_driver().execute = reinterpret_cast<decltype(fake_driver().execute)>(dlsym(kernels, "tide_launch"));
    CHECK(fake_driver().execute != nullptr);
}

} // namespace

TEST(router_outputs_are_the_formulas)
{
    run_kernels_here();
    for (std::size_t const rows : {std::size_t{1}, std::size_t{33}, std::size_t{200}}) // the last in the form for many rows
    {
        Router const router = random_router(rows);
        Routed const routed = run(router, static_cast<int64_t>(rows));
        std::vector<int32_t> exits, others;
        for (std::size_t row = 0; row < rows; ++row)
        {
            double const expected = expected_score(router, row);
            CHECK(std::abs(routed.score[row] - expected) <= 1e-5 * expected);
            (routed.score[row] >= kThreshold ? exits : others).push_back(static_cast<int32_t>(row));
        }
        CHECK(routed.exit_rows == exits && routed.continue_rows == others);
        CHECK(routed.verdict == (others.empty() ? 0 : exits.empty() ? 2 : 1));
        CHECK(rows == 1 || routed.verdict == 1); // lists of both kinds
    }
}

TEST(select_moves_the_rows_that_the_router_lists)
{
    run_kernels_here();
    constexpr std::size_t kRows = 33;
    Router const router = random_router(kRows);
    Routed const routed = run(router, kRows);
    std::vector<float> states(kRows * kSize), deeper(routed.continue_rows.size() * kSize), head(routed.exit_rows.size() * kSize);
    std::transform(router.hidden.begin(), router.hidden.end(), states.begin(), [](float state) { return -state; });
    PluginPtr const plugin = create("TideExitSelect");
    std::vector<nvinfer1::PluginTensorDesc> const inputs{tensor(DataType::kFLOAT, {kRows, kSize}),
        tensor(DataType::kFLOAT, {kRows, kSize}), tensor(DataType::kINT32, {routed.exit_count}),
        tensor(DataType::kINT32, {routed.continue_count}), tensor(DataType::kINT32, {}), tensor(DataType::kINT32, {})};
    void const* const given[] = {router.hidden.data(), states.data(), routed.exit_rows.data(), routed.continue_rows.data(),
        &routed.exit_count, &routed.continue_count};
    void* const results[] = {deeper.data(), head.data()};
    CHECK(runtime(*plugin).onShapeChange(inputs.data(), 6, nullptr, 2) == 0);
    CHECK(runtime(*plugin).enqueue(inputs.data(), nullptr, given, results, nullptr, nullptr) == 0);
    for (std::size_t i = 0; i < deeper.size(); ++i)
    {
        CHECK(deeper[i] == router.hidden[static_cast<std::size_t>(routed.continue_rows[i / kSize]) * kSize + i % kSize]);
    }
    for (std::size_t i = 0; i < head.size(); ++i)
    {
        CHECK(head[i] == states[static_cast<std::size_t>(routed.exit_rows[i / kSize]) * kSize + i % kSize]);
    }
}
