#include "plugin_library.h"

#include <algorithm>
#include <dlfcn.h>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace tide::test
{
namespace
{

using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;

class Logger : public nvinfer1::ILogger
{
public:
    void log(Severity, nvinfer1::AsciiChar const* message) noexcept override
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        lines_ += std::string(message) + "\n";
    }

    std::string take()
    {
        std::lock_guard<std::mutex> const lock(mutex_);
        return std::exchange(lines_, {});
    }

private:
    std::mutex mutex_;
    std::string lines_;
};

class LoggerFinder : public nvinfer1::ILoggerFinder
{
public:
    nvinfer1::ILogger* findLogger() noexcept override
    {
        return &logger;
    }

    Logger logger;
};

LoggerFinder& finder()
{
    static LoggerFinder instance;
    return instance;
}

using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
using SetLoggerFinder = void (*)(nvinfer1::ILoggerFinder*);

GetCreators get_creators = nullptr;

template <typename Function>
Function entry_point(void* library, char const* name)
{
    auto* const function = library == nullptr ? nullptr : dlsym(library, name);
    if (function == nullptr)
    {
        throw std::runtime_error(dlerror());
    }
    return reinterpret_cast<Function>(function);
}

template <typename Capability>
Capability& capability(IPluginV3& plugin, PluginCapabilityType type)
{
    auto* const found = plugin.getCapabilityInterface(type);
    if (found == nullptr)
    {
        throw std::runtime_error("the plugin lacks a capability");
    }
    return *static_cast<Capability*>(found);
}

nvinfer1::Dims dims_of(std::vector<int64_t> const& dims)
{
    nvinfer1::Dims result{};
    result.nbDims = static_cast<int32_t>(dims.size());
    std::copy(dims.begin(), dims.end(), result.d);
    return result;
}

} // namespace

void open_library(char const* path)
{
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    get_creators = entry_point<GetCreators>(library, "getCreators");
    entry_point<SetLoggerFinder>(library, "setLoggerFinder")(&finder());
}

std::vector<nvinfer1::IPluginCreatorV3One*> creators()
{
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* const all = get_creators(count);
    std::vector<nvinfer1::IPluginCreatorV3One*> result;
    std::transform(all, all + count, std::back_inserter(result),
        [](auto* creator) { return static_cast<nvinfer1::IPluginCreatorV3One*>(creator); });
    return result;
}

nvinfer1::IPluginCreatorV3One& creator(std::string const& name)
{
    for (auto* const candidate : creators())
    {
        if (name == candidate->getPluginName())
        {
            return *candidate;
        }
    }
    throw std::runtime_error("the library has no creator of " + name);
}

std::string logged()
{
    return finder().logger.take();
}

PluginPtr create(std::string const& name, std::vector<nvinfer1::PluginField> const& fields, nvinfer1::TensorRTPhase phase)
{
    nvinfer1::PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    return PluginPtr(creator(name).createPlugin("a layer", &collection, phase));
}

nvinfer1::IPluginV3OneCore& core(IPluginV3& plugin)
{
    return capability<nvinfer1::IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
}

nvinfer1::IPluginV3OneBuild& build(IPluginV3& plugin)
{
    return capability<nvinfer1::IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

nvinfer1::IPluginV3OneRuntime& runtime(IPluginV3& plugin)
{
    return capability<nvinfer1::IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

nvinfer1::PluginTensorDesc tensor(nvinfer1::DataType type, std::vector<int64_t> const& dims)
{
    nvinfer1::PluginTensorDesc desc{};
    desc.dims = dims_of(dims);
    desc.type = type;
    desc.format = nvinfer1::PluginFormat::kLINEAR;
    return desc;
}

nvinfer1::DynamicPluginTensorDesc range(
    nvinfer1::DataType type, std::vector<int64_t> const& dims, std::vector<int64_t> const& most)
{
    nvinfer1::DynamicPluginTensorDesc desc{};
    desc.desc = tensor(type, dims);
    desc.min = desc.opt = desc.max = dims_of(most);
    return desc;
}

} // namespace tide::test
