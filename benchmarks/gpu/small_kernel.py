"""Kernels of a few lines that only a check needs, compiled by the NVRTC that the product uses."""

from __future__ import annotations

from tide_plugins.build.nvrtc import Nvrtc
from tide_plugins.build.toolchain import find_toolchain


def compile_cubin(source: bytes, arch: str) -> bytes:
    """``source`` for an architecture such as sm_90. It includes no headers."""
    options = ["--std=c++17", f"--gpu-architecture={arch}"]
    return Nvrtc(find_toolchain(13).library).compile("small_kernel.cu", source, {}, options).content
