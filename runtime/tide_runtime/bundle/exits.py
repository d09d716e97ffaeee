"""The early exits of a bundle, as the depth policies use them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest, exit_graph, score_graph


@dataclass(frozen=True, eq=False)  # identity hash: the cost model looks exits up for every token
class Exit:
    """The exit at one checkpoint.

    Args:
        boundary: number of segments before it.
        graph: its translator, and its router where that reads the hidden state; None: it has neither.
    """

    info: ExitInfo
    boundary: int
    graph: str | None

    @cached_property
    def score_graph(self) -> str | None:
        """The graph of a router that reads the head's logits."""
        return score_graph(self.info) if self.info.scores_logits else None

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
