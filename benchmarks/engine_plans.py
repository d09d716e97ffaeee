"""What the serialized plan of a TensorRT-RTX 1.7 engine says about itself, read without loading it, which would need a GPU.

A plan holds a listing for each optimization profile: tensors with type and size, then the operations of a step between ``main {``
and ``}``. The format is not documented; the tests that use it say so when a release changes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# struct of the fused attention kernel; one source a kernel
_FUSED_ATTENTION = "struct _gemm_mha_v2_callback {"
_SKIPS_TILES = re.compile(r"int32_t\* _tile_skip_map,\s*__myln_")
_MAIN = re.compile(r"\nmain \{\n(.*?)\n\}", re.DOTALL)
_TENSOR = re.compile(r"\btensor=\{[^}\n]* dims=\{ ([^}\n]*)\}[^\n]* name=\"([^\"]*)\"[^\n]* type=(\w+)")


@dataclass(frozen=True)
class PlanTensor:
    """``dims``: sizes, or the names of dynamic ones."""

    name: str
    dims: tuple[str, ...]
    kind: str


class EnginePlan:
    """The readable part of a serialized engine."""

    def __init__(self, plan: bytes) -> None:
        self._text = plan.decode("latin-1")
        self.programs = [[line.strip() for line in main.splitlines() if "={" in line] for main in _MAIN.findall(self._text)]

    @property
    def host_copies(self) -> int:
        """Copies between host and device in the operations of a step, over all profiles."""
        return sum(1 for program in self.programs for line in program if re.match(r'copy=\{ name="copy_(h2d|d2h)', line))

    @property
    def fused_attentions(self) -> int:
        """Fused attention kernels, one for each attention and profile."""
        return self._text.count(_FUSED_ATTENTION)

    @property
    def tile_skips(self) -> int:
        """Fused attention kernels that skip cache tiles that no token sees."""
        return len(_SKIPS_TILES.findall(self._text))

    def tensors(self) -> Iterator[PlanTensor]:
        """The tensors of all programs, more than once if several programs have them."""
        for dims, name, kind in _TENSOR.findall(self._text):
            yield PlanTensor(name, tuple(dims.split()), kind)
