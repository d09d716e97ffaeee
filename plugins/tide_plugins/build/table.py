"""Results of a build as tables (terminal, Markdown) and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_runtime.bundle.architectures import ARCHITECTURES, Architecture
from tide_runtime.errors import OutputError

from tide_plugins.build.builder import BuiltKernel
from tide_plugins.build.compiler import compiler
from tide_plugins.build.resources import Resources
from tide_plugins.kernels import KERNELS

OPENING, CLOSING = "<!-- kernels -->", "<!-- /kernels -->"


@dataclass(frozen=True)
class Grid:
    """A table with one column per architecture, ready to be shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """The table for a terminal, not truncated to its width, which would hide architectures."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join((self.title, aligned[0], "─" * len(aligned[0]), *aligned[1:], ""))

    def markdown(self) -> str:
        lines = (self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows)
        return "\n".join((f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)))


def grids(built: Iterable[BuiltKernel]) -> tuple[Grid, Grid]:
    """Registers and spills of every entry point, and the images' sizes."""
    ordered = in_order(built)
    return _resources_grid([item for item in ordered if not item.architecture.ptx]), _sizes_grid(ordered)


def facts(built: Iterable[BuiltKernel]) -> list[dict[str, Any]]:
    """One JSON object per image: kernel, architecture, file, bytes, and the resources of each entry point."""
    return [
        {
            "kernel": item.kernel.name,
            "arch": item.architecture.name,
            "cuda": item.architecture.cuda,
            "file": item.file_name,
            "bytes": len(item.image.content),
            "cached": item.cached,
            "entry_points": [
                {"name": name, "dtype": dtype} | (asdict(item.image.resources[name]) if item.image.resources else {})
                for name, dtype in item.kernel.entry_points.items()
            ],
        }
        for item in in_order(built)
    ]


def spilling(built: Iterable[BuiltKernel]) -> list[str]:
    """``tide_exit_router_f16 on sm_75: 8 bytes stored, 16 loaded`` for each entry point that keeps registers in memory."""
    return [
        f"{name} on {item.architecture.name}: {used.spill_store_bytes} bytes stored, {used.spill_load_bytes} loaded per thread"
        for item in in_order(built)
        for name, used in item.image.resources.items()
        if used.spills
    ]


def in_order(built: Iterable[BuiltKernel]) -> list[BuiltKernel]:
    """Sorted by kernel and architecture, in the order of their registries."""
    names = [kernel.name for kernel in KERNELS]
    return sorted(built, key=lambda item: (names.index(item.kernel.name), ARCHITECTURES.index(item.architecture)))


def _resources_grid(built: Sequence[BuiltKernel]) -> Grid:
    targets = _targets(built)
    used: dict[str, dict[Architecture, Resources]] = {}
    for item in built:
        for name in item.kernel.entry_points:
            used.setdefault(name, {})[item.architecture] = item.image.resources[name]
    rows = tuple((name, _range(row.values()), *(_registers(row[target]) for target in targets)) for name, row in used.items())
    title = "Registers per thread; spills in bytes per thread after a '!' where there are any"
    return Grid(title, ("entry point", "static shared B", *(target.name for target in targets)), rows)


def _sizes_grid(built: Sequence[BuiltKernel]) -> Grid:
    targets = _targets(built)
    sizes: dict[str, dict[Architecture, int]] = {}
    for item in built:
        sizes.setdefault(item.kernel.name, {})[item.architecture] = len(item.image.content)
    rows = tuple((name, *(f"{row[target] / 1024:.0f}" for target in targets)) for name, row in sizes.items())
    return Grid("Image size, KiB", ("kernel", *(target.name for target in targets)), rows)


def _targets(built: Sequence[BuiltKernel]) -> list[Architecture]:
    present = {item.architecture for item in built}
    return [architecture for architecture in ARCHITECTURES if architecture in present]


def _registers(used: Resources) -> str:
    return f"{used.registers}" + (f"!{used.spill_store_bytes}+{used.spill_load_bytes}" if used.spills else "")


def _range(used: Iterable[Resources]) -> str:
    sizes = sorted({item.shared_bytes for item in used})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"


def write_section(path: Path, built: Sequence[BuiltKernel]) -> None:
    """Replace the section between the marks in ``path`` by the tables of ``built`` and the compilers' versions.

    Raises:
        OutputError: the file does not exist or lacks the marks.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, opening, rest = text.partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing:
        raise OutputError(f"{path} has no {OPENING} … {CLOSING}; add both marks where the tables belong")
    section = "\n\n".join((*(grid.markdown() for grid in grids(built)), _compilers(built)))
    path.write_text(f"{before}{OPENING}\n{section}\n{CLOSING}{after}", encoding="utf-8")


def _compilers(built: Sequence[BuiltKernel]) -> str:
    releases = sorted({item.architecture.cuda for item in built})
    return "Compiled with " + ", ".join(package for release in releases for package in compiler(release).versions) + "."
