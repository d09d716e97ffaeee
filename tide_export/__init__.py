"""HuggingFace model → bundle of compiled segments. torch, transformers and onnx live here and nowhere below."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tide_export.config import ExportConfig

if TYPE_CHECKING:
    from tide_export.export import export

__all__ = ["ExportConfig", "export"]


def __getattr__(name: str) -> Any:
    if name == "export":  # torch takes seconds to import, and a command's --help works without it
        return importlib.import_module("tide_export.export").export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """`tide_export.export` is the function, also once the module of that name has been imported."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, getattr(value, name) if name == "export" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package
