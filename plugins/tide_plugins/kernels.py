"""Registry of the kernels: source files, element types, and names of entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
DTYPES = ("f32", "f16", "bf16")


def entry_point(form: str, dtype: str) -> str:
    """The symbol in the cubin, such as ``tide_exit_router_score_bf16``."""
    return f"tide_{form}_{dtype}"


@dataclass(frozen=True)
class Kernel:
    """One file of `csrc/`.

    Args:
        name: the file's name without ``.cuh``.
        forms: the kernels in it, in the order of their launches.
        dtypes: element types; each form has an ``extern "C"`` entry point for each.
    """

    name: str
    forms: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES

    @property
    def file_name(self) -> str:
        return f"{self.name}.cuh"

    @property
    def entry_points(self) -> dict[str, str]:
        """Symbol → element type."""
        return {entry_point(form, dtype): dtype for form in self.forms for dtype in self.dtypes}


KERNELS = (
    Kernel("exit_router", ("exit_router_project", "exit_router_score")),
    Kernel("exit_score", ("exit_score",)),
    Kernel("choose_token", ("choose_peak", "choose_cut", "choose_race")),
    # These read no states, or copy them as bytes, so one entry point serves every element type.
    Kernel("take_tokens", ("take_tokens",), ("f32",)),
    Kernel("loop_turn", ("loop_turn",), ("f32",)),
    Kernel("exit_join", ("exit_join",), ("f32",)),
    Kernel("exit_candidates", ("exit_candidates",), ("f32",)),
    Kernel("exit_gate", ("exit_gate",), ("f32",)),
    Kernel("exit_inputs", ("exit_inputs",), ("f32",)),
    Kernel("exit_merge", ("exit_merge",), ("f32",)),
    Kernel("text_drafts", ("text_drafts",), ("f32",)),
    Kernel("text_accept", ("text_accept",), ("f32",)),
)
ROUTER = KERNELS[0]


@cache
def sources() -> Mapping[str, bytes]:
    """File name → content of all sources in `csrc/`, sorted; a compilation depends on nothing else."""
    return {path.name: path.read_bytes() for path in sorted(CSRC.iterdir()) if path.suffix in {".cuh", ".h"}}
