"""Import of TensorRT's Python bindings, with errors that say what to install."""

from __future__ import annotations

import importlib
from typing import Any

from tide_runtime.backends.tensorrt.package import TENSORRT
from tide_runtime.errors import TargetError


def tensorrt() -> Any:
    """The module ``tensorrt``. Raises TargetError when it cannot be imported."""
    return TENSORRT.imported()


def tensorrt_plugin() -> Any:
    """The module ``tensorrt.plugin``. Raises TargetError when TensorRT is missing or has no ahead-of-time plugins."""
    version = tensorrt().__version__
    try:
        module = importlib.import_module("tensorrt.plugin")
    except ImportError as error:
        raise TargetError(f"TensorRT {version} has no tensorrt.plugin ({error}); ahead-of-time plugins need 10.9") from error
    if not hasattr(module, "aot_impl"):
        raise TargetError(f"TensorRT {version} has no ahead-of-time plugins; they need 10.9. Use tide_plugins.trt.load() instead")
    return module
