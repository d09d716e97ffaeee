"""The kinds of arms: each is one file; adding one is one line of `ARMS`.

Importing this imports none of their libraries: each arm lives in a process of its own (see `process`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tide_bench.arms.base import ArmKind


def _class(module: str, name: str) -> Callable[[Path], Any]:
    """``name(folder)`` of ``tide_bench.arms.module``, imported when called."""

    def load(folder: Path) -> Any:
        return getattr(import_module(f"tide_bench.arms.{module}"), name)(folder)

    return load


OURS, REFERENCE = "tide", "eager"
ARMS = {
    OURS: ArmKind("TIDE full, 4 segments", _class("tide", "TideArm")),
    REFERENCE: ArmKind("HF eager", _class("eager", "EagerArm")),
    "unsplit": ArmKind("unsplit ONNX graph", _class("tide", "TideArm")),
    "compile": ArmKind("HF torch.compile", _class("compiled", "CompileArm")),
    "genai": ArmKind("onnxruntime-genai", _class("genai", "GenaiArm")),
    "genai-int4": ArmKind("onnxruntime-genai int4", _class("genai", "GenaiArm")),
    "llamacpp": ArmKind("llama.cpp", _class("llamacpp", "LlamacppArm")),
    "openvino": ArmKind("OpenVINO GenAI", _class("openvino", "OpenvinoArm")),
    "static": ArmKind("static layer skip", _class("static_skip", "StaticSkipArm")),
    "predecessor": ArmKind("tide-inference", _class("predecessor", "PredecessorArm")),
}
