"""Loading of libtide_plugins.so into TensorRT's plugin registry, and TensorRT's Python bindings."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tide_runtime.backends.tensorrt.package import TENSORRT
from tide_runtime.errors import TargetError

LIBRARY = "libtide_plugins.so"
VARIABLE = "TIDE_PLUGINS_LIBRARY"
NAMESPACE, VERSION = "tide", "1"
PLUGINS = ("TideExitRouter", "TideExitSelect")


def load(library: str | os.PathLike[str] | None = None) -> None:
    """Register TideExitRouter and TideExitSelect, once per process, before engines are parsed, built or deserialized.

    Args:
        library: the library that plugins/trt builds; default: ``$TIDE_PLUGINS_LIBRARY``.

    Raises:
        TargetError: TensorRT is not installed, or the library is missing or built for another TensorRT.
    """
    registry = tensorrt().get_plugin_registry()
    if all(registry.get_creator(name, VERSION, NAMESPACE) is not None for name in PLUGINS):
        return
    path = _existing(library)
    if registry.load_library(str(path)) is None:
        raise TargetError(
            f"TensorRT {tensorrt().__version__} cannot load {path}; its logger says why. Build the library with the headers of "
            "this TensorRT (plugins/trt/README.md)"
        )


def _existing(library: str | os.PathLike[str] | None) -> Path:
    named = library if library is not None else os.environ.get(VARIABLE)
    if named is None:
        raise TargetError(
            f"which {LIBRARY} is not said; pass its path or set {VARIABLE}. plugins/trt/README.md tells how to build it"
        )
    path = Path(named).expanduser().resolve()
    if not path.is_file():
        raise TargetError(f"there is no plugin library {path}; build it as plugins/trt/README.md tells")
    return path


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
