"""Locations of NVRTC and CUDA's device headers in the wheels that NVIDIA publishes for each major release.

Both releases can be installed together, because names and folders of the wheels and sonames of the libraries differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class Toolchain:
    """NVRTC's shared library, the folder of CUDA's device headers, and their wheels as ``name==version``."""

    library: Path
    include: Path
    versions: tuple[str, ...]


# CUDA release → wheel and required file.
_LIBRARY = {12: ("nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12"), 13: ("nvidia-cuda-nvrtc", "libnvrtc.so.13")}
_HEADER = {12: ("nvidia-cuda-runtime-cu12", "cuda_fp16.h"), 13: ("nvidia-cuda-runtime", "cuda_fp16.h")}


def find_toolchain(cuda: int) -> Toolchain:
    """The NVRTC of CUDA release ``cuda`` (12 or 13).

    Raises:
        TargetError: a wheel is not installed.
    """
    library, library_version = _find(*_LIBRARY[cuda])
    header, header_version = _find(*_HEADER[cuda])
    return Toolchain(library, header.parent, (library_version, header_version))


def _find(package: str, file_name: str) -> tuple[Path, str]:
    """A file of an installed wheel, and ``name==version``."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise TargetError(
            f"the package {package} is not installed; compiling the kernels needs it: pip install 'tide-llm[kernels]'"
        ) from None
    paths = [Path(str(found.locate_file(file))) for file in found.files or () if file.name == file_name]
    if not paths or not paths[0].is_file():
        raise TargetError(f"{package} {found.version} holds no {file_name}; repair it: pip install --force-reinstall {package}")
    return paths[0], f"{package}=={found.version}"
