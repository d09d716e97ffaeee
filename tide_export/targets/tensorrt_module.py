"""TensorRT and TensorRT-RTX through one door: two packages with one API, of which RTX's compiles for GPUs that are not there."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class TensorRTPackage:
    """One of the two. ``least``: the oldest release with all that our networks ask of it."""

    module: str
    title: str
    least: tuple[int, int]
    pip: str

    def load(self) -> Any:
        """The imported module. Raises TargetError, with the pip command, when it is missing, broken or too old."""
        try:
            module = importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:  # the last two: its libraries are missing or cannot be fetched
            raise TargetError(f"{self.title}'s Python package {self.module} cannot be imported ({error}); {self.pip}") from error
        if release(module) < self.least:
            raise TargetError(
                f"{self.title} {module.__version__} is installed, expected {'.'.join(map(str, self.least))} or newer; {self.pip}"
            )
        return module


def release(module: Any) -> tuple[int, int]:
    """Major and minor version of an imported module."""
    major, minor = re.findall(r"\d+", module.__version__)[:2]
    return int(major), int(minor)


RTX = TensorRTPackage("tensorrt_rtx", "TensorRT-RTX", (1, 7), "pip install 'tide-llm[rtx]'")
TENSORRT = TensorRTPackage("tensorrt", "TensorRT", (11, 0), "pip install 'tide-llm[tensorrt]'")
