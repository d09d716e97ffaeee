#include "fields.h"

#include "errors.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace tide::trt
{
namespace
{

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

std::string names_of(std::vector<PluginField> const& known)
{
    std::string names;
    for (auto const& field : known)
    {
        names += (names.empty() ? "" : ", ") + std::string(field.name);
    }
    return names;
}

template <typename Value>
Value value_of(PluginField const& field) noexcept
{
    Value value;
    std::memcpy(&value, field.data, sizeof(value)); // data of a stored engine need not be aligned
    return value;
}

template <typename Value>
Value checked(char const* name, Value value, Value low, Value high)
{
    if (value >= low && value <= high) // false for NaN
    {
        return value;
    }
    throw PluginError(Status::kBadField,
        std::string("field ") + name + " is " + std::to_string(value) + "; it must be from " + std::to_string(low) + " to "
            + std::to_string(high));
}

[[noreturn]] void wrong_type(PluginField const& field, char const* expected)
{
    throw PluginError(Status::kBadField,
        std::string("field ") + field.name + " has PluginFieldType " + std::to_string(static_cast<int32_t>(field.type))
            + "; it must be one " + expected);
}

} // namespace

Fields::Fields(nvinfer1::PluginFieldCollection const* collection, std::vector<PluginField> const& known)
{
    if (collection != nullptr)
    {
        given_ = *collection;
    }
    std::set<std::string> seen;
    for (int32_t i = 0; i < given_.nbFields; ++i)
    {
        std::string const name = given_.fields[i].name;
        bool const is_known
            = std::any_of(known.begin(), known.end(), [&](PluginField const& field) { return name == field.name; });
        if (!is_known || !seen.insert(name).second)
        {
            throw PluginError(Status::kBadField,
                "field " + name + (is_known ? " is given twice" : " is unknown; the fields are: " + names_of(known)));
        }
        if (given_.fields[i].data == nullptr || given_.fields[i].length != 1)
        {
            throw PluginError(Status::kBadField, "field " + name + " must hold one value");
        }
    }
}

PluginField const* Fields::find(char const* name) const
{
    PluginField const* const end = given_.fields + given_.nbFields;
    PluginField const* const field
        = std::find_if(given_.fields, end, [&](PluginField const& f) { return std::strcmp(f.name, name) == 0; });
    return field == end ? nullptr : field;
}

int32_t Fields::integer(char const* name, int32_t fallback, int32_t low, int32_t high) const
{
    PluginField const* const field = find(name);
    if (field == nullptr)
    {
        return fallback;
    }
    switch (field->type)
    {
    case PluginFieldType::kINT32: return checked(name, value_of<int32_t>(*field), low, high);
    case PluginFieldType::kINT64:
        return static_cast<int32_t>(checked<int64_t>(name, value_of<int64_t>(*field), low, high));
    default: wrong_type(*field, "int32 or int64");
    }
}

float Fields::number(char const* name, float fallback, float low, float high) const
{
    PluginField const* const field = find(name);
    if (field == nullptr)
    {
        return fallback;
    }
    switch (field->type)
    {
    case PluginFieldType::kFLOAT32: return checked(name, value_of<float>(*field), low, high);
    case PluginFieldType::kFLOAT64:
        return static_cast<float>(checked<double>(name, value_of<double>(*field), low, high));
    default: wrong_type(*field, "float32 or float64");
    }
}

} // namespace tide::trt
