// Dimension expressions that are plain numbers, for a plugin that asks what TensorRT's builder would answer.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <deque>
#include <initializer_list>

namespace tide::test
{

class Number final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr
{
public:
    explicit Number(int64_t value, int32_t size_tensor = -1, int64_t upper = 0)
        : value(value)
        , size_tensor(size_tensor)
        , upper(upper)
    {
        mImpl = this;
    }

    int64_t const value;       //!< of a size tensor: what the builder tunes with
    int32_t const size_tensor; //!< the output that gives the value when the engine runs; -1: none
    int64_t const upper;       //!< of a size tensor

private:
    bool isConstant() const override
    {
        return false;
    }

    int64_t getConstantValue() const override
    {
        return value;
    }

    bool isSizeTensor() const override
    {
        return size_tensor >= 0;
    }
};

inline Number const& number(nvinfer1::IDimensionExpr const* expression)
{
    return *static_cast<Number const*>(expression);
}

class Expressions final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder
{
public:
    Expressions()
    {
        mImpl = this;
    }

    nvinfer1::DimsExprs dims(std::initializer_list<int64_t> sizes)
    {
        nvinfer1::DimsExprs result{};
        for (int64_t const size : sizes)
        {
            result.d[result.nbDims++] = constant(size);
        }
        return result;
    }

    nvinfer1::IDimensionExpr const* constant(int64_t value) override
    {
        return &numbers_.emplace_back(value);
    }

private:
    nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation op, nvinfer1::IDimensionExpr const& first,
        nvinfer1::IDimensionExpr const& second) override
    {
        int64_t const a = number(&first).value;
        int64_t const b = number(&second).value;
        switch (op)
        {
        case nvinfer1::DimensionOperation::kPROD: return constant(a * b);
        case nvinfer1::DimensionOperation::kCEIL_DIV: return constant((a + b - 1) / b);
        default: return nullptr;
        }
    }

    nvinfer1::IDimensionExpr const* declareSizeTensor(
        int32_t output, nvinfer1::IDimensionExpr const& opt, nvinfer1::IDimensionExpr const& upper) override
    {
        return &numbers_.emplace_back(number(&opt).value, output, number(&upper).value);
    }

    std::deque<Number> numbers_; // addresses stay
};

} // namespace tide::test
