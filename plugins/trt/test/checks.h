// As much of a test framework as this needs: named tests, CHECK, and a line for each.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace tide::test
{

//! A TEST body runs once, in the order of the file; an exception in it is its failure.
struct Test
{
    Test(char const* name, std::function<void()> body);
};

inline void check(bool holds, char const* condition, char const* file, int line)
{
    if (!holds)
    {
        throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + condition);
    }
}

} // namespace tide::test

#define CHECK(condition) ::tide::test::check((condition), #condition, __FILE__, __LINE__)
#define TEST(name)                                                                                                         \
    static void name();                                                                                                    \
    static ::tide::test::Test const test_##name(#name, name);                                                              \
    static void name()
