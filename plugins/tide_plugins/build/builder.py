"""Compilation of kernels for architectures, with a cache keyed by sources, options and compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from tide_runtime.bundle.architectures import Architecture
from tide_runtime.machine_cache import CachedFiles, cache_folder

from tide_plugins.build.compiler import compiler
from tide_plugins.build.resources import KernelImage, Resources
from tide_plugins.kernels import Kernel, sources

_ENTRY_FORMAT = "2"  # version of the cache entries


@dataclass(frozen=True)
class BuiltKernel:
    """One kernel's image for one architecture. ``cached``: it was compiled earlier, perhaps by another process."""

    kernel: Kernel
    architecture: Architecture
    image: KernelImage
    cached: bool

    @property
    def file_name(self) -> str:
        """The image's file name, such as ``exit_router.sm_90.cubin``."""
        return f"{self.kernel.name}.{self.architecture.name}.{self.architecture.suffix}"


class Builder:
    """Compiles images that are not in the cache. Threads may share a builder.

    Args:
        cache: folder of the images that were compiled earlier; by default in the user's cache folder.
        files: file name → content, the kernels and the headers they may include; by default those of `csrc/`.
    """

    def __init__(self, cache: Path | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self._cache = CachedFiles(cache or cache_folder("cubins"))
        self._files = sources() if files is None else files

    def build(self, kernel: Kernel, architecture: Architecture, conditions: bool = True) -> BuiltKernel:
        """The kernel's image for ``architecture``; without ``conditions`` it sets no CUDA graph conditions.

        Raises:
            TargetError: the compiler is not installed, does not know the architecture, or an entry point is missing.
            CompilationError: the compiler rejects the source.
        """
        using = compiler(architecture.cuda)
        made_from = [_ENTRY_FORMAT, kernel.name, *using.identity(architecture, conditions)]
        key = content_key(chain(made_from, self._files, self._files.values()))
        if (found := self._cache.load(key)) is not None:
            facts, content = found
            resources = {name: Resources(**values) for name, values in facts.items()}
            return BuiltKernel(kernel, architecture, KernelImage(content, resources), cached=True)
        image = using.compile(kernel, architecture, self._files, conditions)
        self._cache.store(key, {name: asdict(values) for name, values in image.resources.items()}, image.content)
        return BuiltKernel(kernel, architecture, image, cached=False)

    def build_all(self, kernels: Sequence[Kernel], targets: Sequence[Architecture], jobs: int) -> Iterator[BuiltKernel]:
        """Build every kernel for every target, ``jobs`` at a time, and yield them when done. The first failure is raised."""
        for cuda in {target.cuda for target in targets}:
            compiler(cuda)  # fails early if a wheel is missing
        with ThreadPoolExecutor(jobs) as pool:
            try:
                tasks = [pool.submit(self.build, kernel, target) for target in targets for kernel in kernels]
                for task in as_completed(tasks):
                    yield task.result()
            finally:
                pool.shutdown(cancel_futures=True)


def content_key(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of ``parts`` with their lengths, so that different lists never have the same input."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
