"""TIDE's kernels inside TensorRT engines: the plugin library of plugins/trt, or ahead-of-time Python plugins (`aot`)."""

from __future__ import annotations

from tide_plugins.trt.library import load

__all__ = ["load"]
