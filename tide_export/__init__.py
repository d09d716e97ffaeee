"""HuggingFace model → bundle of compiled segments. torch, transformers and onnx live here and nowhere below."""

from typing import TYPE_CHECKING, Any

from tide_export.config import ExportConfig

if TYPE_CHECKING:
    from tide_export.export_model import export

__all__ = ["ExportConfig", "export"]


def __getattr__(name: str) -> Any:
    if name == "export":  # torch takes seconds to import, and a command's --help works without it
        from tide_export.export_model import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
