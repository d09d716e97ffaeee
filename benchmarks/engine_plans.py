"""What the serialized plan of a TensorRT-RTX 1.7 engine says about itself, read without loading it, which would need a GPU.

A plan holds a listing for each optimization profile: tensors with type and size, then the operations of a step between ``main {``
and ``}``. The format is not documented; the tests that use it say so when a release changes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# In a fused attention's source: its struct, its parameter for cache tiles to skip; then the name of products with int4 weights.
_FUSED_ATTENTION = "struct _gemm_mha_v2_callback {"
_SKIPS_TILES = re.compile(r"int32_t\* _tile_skip_map,\s*__myln_")
_FUSED_INT4 = "runtime_fusion={ name=__myl_ReplCastMulCastFc"
_MAIN = re.compile(r"\nmain \{\n(.*?)\n\}", re.DOTALL)
_CONSTANT = re.compile(r'tensor=\{[^\n]*?const_payload_size=(\d+) dims=\{ ([^}]*)\}[^\n]*? name="([^"]*)"[^\n]* type=(\w+)')


@dataclass(frozen=True)
class PlanConstant:
    """A weight or other constant: ``kind`` is int4, half, bfloat, int64, …"""

    name: str
    kind: str
    dims: tuple[int, ...]
    bytes: int


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

    @property
    def fused_int4_products(self) -> int:
        """Products that dequantise an int4 weight on the way, one for each weight and profile."""
        return self._text.count(_FUSED_INT4)

    def constants(self) -> Iterator[PlanConstant]:
        """The constants of each profile's listing: as many copies as profiles, which share the memory."""
        for count_bytes, dims, name, kind in _CONSTANT.findall(self._text):
            yield PlanConstant(name, kind, tuple(int(size) for size in dims.split()), int(count_bytes))
