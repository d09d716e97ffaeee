"""Compiler of one CUDA release, and the options that the kernels are compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tide_runtime.bundle.architectures import Architecture
from tide_runtime.errors import TargetError

from tide_plugins.build.nvrtc import Nvrtc
from tide_plugins.build.resources import KernelImage, Resources, parse_resources
from tide_plugins.build.toolchain import find_toolchain
from tide_plugins.kernels import Kernel

# With a driver present NVRTC uses its own cache, whose entries have no ptxas report.
_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
# ptxas leaves cudaGraphSetConditional to the driver, which has it since 12.4. What CUDA 13 compiles needs a driver of 13
# anyhow; on a V100 the driver may be any of 12's.
_OPTIONS_OF_CUDA: Mapping[int, tuple[str, ...]] = {12: (), 13: ("--define-macro=TIDE_GRAPH_CONDITION",)}


class Compiler:
    """NVRTC of CUDA release ``cuda`` with its headers. Threads may share one.

    Raises:
        TargetError: its wheels are not installed.
    """

    def __init__(self, cuda: int) -> None:
        self._toolchain = find_toolchain(cuda)
        self._nvrtc = Nvrtc(self._toolchain.library)
        self._conditions = _OPTIONS_OF_CUDA[cuda]
        self.versions = self._toolchain.versions  # package==version of the compiler and of its headers

    def identity(self, architecture: Architecture, conditions: bool = True) -> tuple[str, ...]:
        """Everything besides the sources that an image depends on: versions, options, architecture."""
        return (*self.versions, *self._options(conditions), architecture.name)

    def compile(
        self, kernel: Kernel, architecture: Architecture, files: Mapping[str, bytes], conditions: bool = True
    ) -> KernelImage:
        """Compile ``kernel``; ``#include`` searches ``files`` before CUDA's headers.

        Args:
            conditions: whether kernels refer to the driver's function that sets graph conditions.

        Raises:
            TargetError: this NVRTC does not know the architecture, or the image lacks an entry point.
            CompilationError: NVRTC rejects the source; contains its log.
        """
        self.check_support(architecture)
        include = f"--include-path={self._toolchain.include}"
        options = [*self._options(conditions), f"--gpu-architecture={architecture.name}", include]
        image = self._nvrtc.compile(kernel.file_name, files[kernel.file_name], files, options, architecture.ptx)
        if architecture.ptx:  # no ptxas report: the driver compiles PTX when it is loaded
            return KernelImage(image.content, {})
        return KernelImage(image.content, _complete(kernel, parse_resources(image.log)))

    def _options(self, conditions: bool) -> tuple[str, ...]:
        return (*_OPTIONS, *self._conditions) if conditions else _OPTIONS

    def check_support(self, architecture: Architecture) -> None:
        """Raises TargetError when this NVRTC does not know ``architecture``."""
        known = self._nvrtc.supported_architectures()
        if architecture.compute not in known:
            major, minor = self._nvrtc.version()
            raise TargetError(f"NVRTC {major}.{minor} does not compile for {architecture.name}; it knows {_listed(known)}")


def _complete(kernel: Kernel, found: dict[str, Resources]) -> dict[str, Resources]:
    if set(found) != set(kernel.entry_points):
        actual = ", ".join(found) or "none"
        expected = ", ".join(kernel.entry_points)
        raise TargetError(f"{kernel.file_name} has the entry points {actual}; the table in kernels.py says {expected}")
    return found


def _listed(known: list[int]) -> str:
    return ", ".join(f"sm_{compute}" for compute in known)


def why_not_built(architecture: Architecture) -> str | None:
    """Reason why the installed compilers cannot build for ``architecture``, or None."""
    try:
        compiler(architecture.cuda).check_support(architecture)
    except TargetError as error:
        return str(error)
    return None


@cache
def compiler(cuda: int) -> Compiler:
    """The compiler of CUDA release ``cuda``, one per process."""
    return Compiler(cuda)
