"""The early exits of a bundle, as the depth policies use them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest, exit_graph


@dataclass(frozen=True, eq=False)  # identity hash: the cost model looks exits up for every token
class Exit:
    """The exit at one checkpoint. ``boundary``: number of segments before it; ``graph``: its router and translator, or None."""

    info: ExitInfo
    boundary: int
    graph: str | None

    @cached_property
    def layers(self) -> int:
        """Decoder layers that run for a token that takes this exit, including the head's tail."""
        return self.info.checkpoint + self.info.tail_layers


def bundle_exits(manifest: Manifest) -> list[Exit]:
    """All exits, shallow first; none without a calibration."""
    infos = manifest.calibration.exits if manifest.calibration is not None else []
    return [
        Exit(info, manifest.checkpoints.index(info.checkpoint) + 1, exit_graph(info) if info.graph_outputs() else None)
        for info in infos
    ]
