"""Check of whether TensorRT-RTX can run an engine on this machine, from the file header, without loading the engine.

TensorRT has no such query; its engines are checked when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

VALID = "valid"
SLOWER = f"{VALID}, slower than one built here"


def engines_validity(trt: Any, files: Iterable[Path]) -> str:
    """``valid``, or TensorRT-RTX's reason for the first of ``files`` that cannot be loaded, else for the first slower one.

    Args:
        trt: the module ``tensorrt_rtx``.
    """
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    answer = VALID
    for path in files:
        with path.open("rb") as file:
            validity, diagnostics = runtime.get_engine_validity(file.read(runtime.engine_header_size))
        if validity == trt.EngineValidity.INVALID:
            return f"invalid: {path.name}: {_reasons(trt, diagnostics)}"
        if validity == trt.EngineValidity.SUBOPTIMAL and answer == VALID:  # runs; another file may still be invalid
            answer = f"{SLOWER}: {path.name}: {_reasons(trt, diagnostics)}"
    return answer


def _reasons(trt: Any, diagnostics: int) -> str:
    members = trt.EngineInvalidityDiagnostics.__members__
    reasons = [name.lower().replace("_", " ") for name, bit in members.items() if diagnostics & int(bit)]
    return ", ".join(reasons) or "no reason given"
