// life_cycle LIBRARY: run every test against the plugin library; exit status 1 when one fails.

#include "checks.h"
#include "plugin_library.h"

#include <cstdio>
#include <utility>
#include <vector>

namespace tide::test
{
namespace
{

std::vector<std::pair<char const*, std::function<void()>>>& tests()
{
    static std::vector<std::pair<char const*, std::function<void()>>> all;
    return all;
}

} // namespace

Test::Test(char const* name, std::function<void()> body)
{
    tests().emplace_back(name, std::move(body));
}

} // namespace tide::test

int main(int argc, char** argv)
{
    if (argc != 2)
    {
        std::fprintf(stderr, "usage: %s libtide_plugins.so\n", argv[0]);
        return 2;
    }
    tide::test::open_library(argv[1]);
    int failed = 0;
    for (auto const& [name, body] : tide::test::tests())
    {
        try
        {
            body();
            std::printf("ok %s\n", name);
        }
        catch (std::exception const& error)
        {
            ++failed;
            std::printf("FAILED %s: %s\n", name, error.what());
        }
        std::fflush(stdout); // a crash in the next one must not take these lines with it
    }
    return failed == 0 ? 0 : 1;
}
