"""The early exits of a bundle, as the depth policies use them."""

from __future__ import annotations

from dataclasses import dataclass

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest, exit_graph


@dataclass(frozen=True, eq=False)  # as a key of what exits cost it is looked up for every token
class Exit:
    """One checkpoint's exit. ``boundary``: segments run before it; ``graph``: of its router and translator, if it has one."""

    info: ExitInfo
    boundary: int
    graph: str | None

    @property
    def layers(self) -> int:
        """Decoder layers that run before it speaks."""
        return self.info.checkpoint + self.info.tail_layers


def bundle_exits(manifest: Manifest) -> list[Exit]:
    """All exits, shallow first; none without a calibration."""
    infos = manifest.calibration.exits if manifest.calibration is not None else []
    return [
        Exit(info, manifest.checkpoints.index(info.checkpoint) + 1, exit_graph(info) if info.graph_outputs() else None)
        for info in infos
    ]
