"""A cost table read at any number of tokens: what segments, head, exit graphs and the host take for S tokens of one row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.errors import CalibrationError


class StepTimes:
    """Times in ms by number of tokens S = 0 … ``most``; linear between measured sizes and beyond the last two.

    ``host``, ``asking``, ``deep``: of the runtime's own loop, for a plain step, an exit asked, a run of what waits.

    Args:
        costs: a table with one row measured at two sizes or more, one token among them.
        most: largest S that will be asked for.

    Raises CalibrationError when the table lacks those sizes.
    """

    def __init__(self, costs: CostTable, most: int) -> None:
        steps = sorted((step for step in costs.steps if step.rows == 1), key=lambda step: step.seq)
        sizes = np.array([step.seq for step in steps], float)
        if len(sizes) < 2 or sizes[0] != 1:
            raise CalibrationError(
                f"the cost table has one row measured at {[step.seq for step in steps]} tokens; "
                "it needs 1 and at least one larger size: measure again with seqs={1: (1, 2, 4, 8, 16)}"
            )
        self.launch = _line(sizes, np.array([step.launch_ms for step in steps]), most)
        self.layer = _line(sizes, np.array([step.layer_ms for step in steps]), most)
        self.head = _line(sizes, np.array([step.head_ms for step in steps]), most)
        self.logits = _line(sizes, np.array([step.logits_ms for step in steps]), most)
        one = steps[0]
        self.exit = one.exit_ms
        self.host, self.asking, self.deep = one.host_ms, one.host_ms + one.ask_extra_ms, one.host_ms + one.deep_extra_ms
        self.unsplit = costs.unsplit_ms
        self._warm = {int(layers): shares for layers, shares in costs.warm_shares.items()}

    def segments(self, launches: int, layers: int) -> NDArray[np.float64]:
        """[most + 1] ms of ``launches`` segments with ``layers`` layers in all, by number of tokens."""
        times = launches * self.launch + layers * self.layer
        times[0] = 0.0
        return times

    def whole(self, layers: int) -> NDArray[np.float64]:
        """[most + 1] ms of a pass through all ``layers`` layers: one launch, the head on every token, the host left out."""
        return self.segments(1, layers) + self.logits

    def warm_shares(self, depth: int, layers: int) -> NDArray[np.float64]:
        """Of a prefix of ``depth`` of the model's ``layers`` layers, and the head: their time when 0, 1, 2, … turns stopped early
        since a pass through all layers, over that among such passes. Linear between measured depths."""
        if not self._warm:
            return np.ones(1)
        depths = [*sorted(self._warm), layers]
        table = np.array([*(self._warm[d] for d in depths[:-1]), [1.0] * len(self._warm[depths[0]])])
        return np.array([np.interp(depth, depths, shares) for shares in table.T])

    @property
    def extra_token(self) -> float:
        """ms that one layer takes longer for each token more, a line through the sizes up to 8."""
        sizes = np.arange(1, min(8, len(self.layer) - 1) + 1)
        return max(0.0, float(np.polyfit(sizes, self.layer[sizes], 1)[0])) if len(sizes) > 1 else 0.0


def _line(sizes: NDArray[np.float64], values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    wanted = np.arange(most + 1, dtype=float)
    slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
    return np.interp(wanted, sizes, values) + slope * np.maximum(0.0, wanted - sizes[-1])
