"""Where NVRTC and CUDA's device headers are: the wheels that NVIDIA publishes for each major release.

The two releases lie side by side: their wheels have different names and folders, and their libraries different sonames.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class Toolchain:
    """NVRTC's shared library, the folders that ``#include`` searches, and what they were installed from: ``name==version``."""

    library: Path
    include: tuple[Path, ...]
    versions: tuple[str, ...]


# CUDA release → wheel and the file looked for in it. CUDA 12 has its crt/ headers in the wheel of nvcc.
_LIBRARY = {12: ("nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12"), 13: ("nvidia-cuda-nvrtc", "libnvrtc.so.13")}
_HEADERS = {
    12: (("nvidia-cuda-runtime-cu12", "cuda_fp16.h"), ("nvidia-cuda-nvcc-cu12", "crt/mma.h")),
    13: (("nvidia-cuda-runtime", "cuda_fp16.h"), ("nvidia-cuda-crt", "crt/mma.h")),
}


def find_toolchain(cuda: int) -> Toolchain:
    """The NVRTC of CUDA release ``cuda`` (12 or 13).

    Raises:
        TargetError: a wheel is not installed.
    """
    library, version = _find(*_LIBRARY[cuda])
    headers = [(_find(package, f"include/{header}"), header) for package, header in _HEADERS[cuda]]
    folders = [path.parents[header.count("/")] for (path, _), header in headers]
    return Toolchain(library, tuple(dict.fromkeys(folders)), (version, *(found for (_, found), _ in headers)))


def _find(package: str, ending: str) -> tuple[Path, str]:
    """The file of an installed wheel whose path ends so, and ``name==version``."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise TargetError(
            f"the package {package} is not installed; compiling the kernels needs it: pip install 'tide-llm[kernels]'"
        ) from None
    wanted = PurePosixPath(ending).parts
    paths = [Path(str(found.locate_file(file))) for file in found.files or () if file.parts[-len(wanted) :] == wanted]
    if not paths or not paths[0].is_file():
        raise TargetError(f"{package} {found.version} holds no {ending}; repair it: pip install --force-reinstall {package}")
    return paths[0], f"{package}=={found.version}"
