"""HuggingFace model → bundle of compiled segments. torch, transformers and onnx live here and nowhere below."""

from tide_export.config import ExportConfig
from tide_export.export import export

__all__ = ["ExportConfig", "export"]
