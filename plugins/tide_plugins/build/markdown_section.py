"""Insertion of the build's tables into a Markdown document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tide_runtime.errors import OutputError

from tide_plugins.build.builder import BuiltKernel
from tide_plugins.build.compiler import compiler
from tide_plugins.build.table import grids

OPENING, CLOSING = "<!-- kernels -->", "<!-- /kernels -->"


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
