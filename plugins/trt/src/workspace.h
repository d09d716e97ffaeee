// Hands out aligned pieces of the workspace that TensorRT lends to enqueue; with no memory behind it, adds up what they take.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide::trt
{

class Workspace
{
public:
    static constexpr std::size_t kAlignment = 256; // what the kernels' plans ask for

    explicit Workspace(void* memory = nullptr) noexcept
        : start_(reinterpret_cast<std::uintptr_t>(memory))
    {
    }

    template <typename Element>
    Element* take(std::size_t count) noexcept
    {
        auto* const piece = reinterpret_cast<Element*>(start_ + bytes_);
        bytes_ += (count * sizeof(Element) + kAlignment - 1) / kAlignment * kAlignment;
        return piece;
    }

    std::size_t bytes() const noexcept
    {
        return bytes_;
    }

private:
    std::uintptr_t start_;
    std::size_t bytes_ = 0;
};

} // namespace tide::trt
