"""The kinds of arms: each is one file; adding one is one line of `ARMS`.

Importing this imports none of their libraries: each arm lives in a process of its own (see `process`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def _class(module: str, name: str) -> Callable[[Path], Any]:
    """``name(folder)`` of ``tide_bench.arms.module``, imported when called."""

    def load(folder: Path) -> Any:
        return getattr(import_module(f"tide_bench.arms.{module}"), name)(folder)

    return load


OURS, REFERENCE = "tide", "eager"
ARMS: dict[str, Callable[[Path], Any]] = {
    OURS: _class("tide", "TideArm"),
    REFERENCE: _class("eager", "EagerArm"),
    "unsplit": _class("tide", "TideArm"),
    "compile": _class("compiled", "CompileArm"),
    "genai": _class("genai", "GenaiArm"),
    "genai-int4": _class("genai", "GenaiArm"),
    "llamacpp": _class("llamacpp", "LlamacppArm"),
    "openvino": _class("openvino", "OpenvinoArm"),
    "static": _class("static_skip", "StaticSkipArm"),
    "predecessor": _class("predecessor", "PredecessorArm"),
}
