#include "logging.h"

#include <atomic>
#include <cstdio>

namespace tide::trt
{
namespace
{
std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};
constexpr std::size_t kLongestMessage = 1024; // on the stack: logging must work when memory is exhausted
} // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept
{
    nvinfer1::ILoggerFinder* none = nullptr;
    if (finder != nullptr)
    {
        logger_finder.compare_exchange_strong(none, finder);
    }
}

void log_error(char const* where, char const* what) noexcept
{
    char message[kLongestMessage];
    std::snprintf(message, sizeof(message), "%s: %s", where, what);
    auto* const finder = logger_finder.load();
    auto* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger == nullptr)
    {
        std::fprintf(stderr, "tide_plugins: %s\n", message);
        return;
    }
    logger->log(nvinfer1::ILogger::Severity::kERROR, message);
}

} // namespace tide::trt
