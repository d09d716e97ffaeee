// What TensorRT looks for in a plugin library that it loads (IPluginRegistry::loadLibrary, trtexec --dynamicPlugins).

#include "creator.h"
#include "exit_router.h"
#include "exit_select.h"
#include "logging.h"

#include <NvInferRuntime.h>

#include <iterator>

#define TIDE_ENTRY_POINT extern "C" __attribute__((visibility("default")))

//! The creators, which live as long as the library; `count` receives their number.
TIDE_ENTRY_POINT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    static tide::trt::Creator<tide::trt::ExitRouterPlugin> exit_router;
    static tide::trt::Creator<tide::trt::ExitSelectPlugin> exit_select;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&exit_router, &exit_select};
    count = static_cast<int32_t>(std::size(creators));
    return creators;
}

//! Where the library finds the logger of the registry that loaded it.
TIDE_ENTRY_POINT void setLoggerFinder(nvinfer1::ILoggerFinder* finder)
{
    tide::trt::set_logger_finder(finder);
}
