"""Import of TensorRT and TensorRT-RTX, two packages with one API, for export, inference and plugins."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.manifest import TargetInfo
from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class TensorRTPackage:
    """One of the two packages. ``min_release`` and ``max_release``: oldest and newest release that can build our networks."""

    module: str
    title: str
    min_release: tuple[int, int]
    pip: str
    max_release: tuple[int, int] | None = None

    def imported(self) -> Any:
        """The module, of any release. Raises TargetError, with the pip command, when it is missing or broken."""
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:  # the last two: shared libraries are missing
            raise TargetError(f"{self.title}'s Python package {self.module} cannot be imported ({error}); {self.pip}") from error

    def load(self) -> Any:
        """The module, for building engines. Raises TargetError like `imported`, and for an unsupported release."""
        module = self.imported()
        if release(module) < self.min_release or (self.max_release is not None and release(module) > self.max_release):
            min_release, max_release = (".".join(map(str, numbers)) for numbers in (self.min_release, self.max_release or ()))
            wanted = f"{min_release} to {max_release}" if max_release else f"{min_release} or newer"
            raise TargetError(f"{self.title} {module.__version__} is installed, expected {wanted}; {self.pip}")
        return module


def release(module: Any) -> tuple[int, int]:
    """Major and minor version of an imported module."""
    major, minor = re.findall(r"\d+", module.__version__)[:2]
    return int(major), int(minor)


RTX = TensorRTPackage("tensorrt_rtx", "TensorRT-RTX", (1, 7), "pip install 'tide-llm[rtx]'")
# CUDA 13 and TensorRT after 10.4 do not support V100.
TENSORRT_VOLTA = TensorRTPackage("tensorrt", "TensorRT", (10, 0), "pip install tensorrt-cu12==10.4.0", (10, 4))
# 10.15 and 10.16 have attention layers and cache updates too; none has parsed our graphs, and the API checks hold 11.4.
TENSORRT = TensorRTPackage("tensorrt", "TensorRT", (11, 0), "pip install 'tide-llm[tensorrt]'")


def _package(target: TargetInfo) -> TensorRTPackage:
    if target.backend == "tensorrt-rtx":
        return RTX
    return TENSORRT_VOLTA if target.compute == [70] else TENSORRT


def load_module(target: TargetInfo) -> Any:
    """The module that runs the target's engines.

    Raises TargetError, with the pip command, when it is missing or of another version than built them.
    """
    trt = _package(target).imported()
    built = (target.tool or "").split()
    if len(built) > 1 and built[1] != trt.__version__ and "version-compatible" not in (target.tool or ""):
        raise TargetError(
            f"the engines were built by {built[0]} {built[1]}, here is {trt.__version__}; pip install {built[0]}=={built[1]}, "
            "or export again with the version that is here"
        )
    return trt
