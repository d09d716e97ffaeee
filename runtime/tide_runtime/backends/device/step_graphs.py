"""Whole steps as CUDA graphs: all graphs of a pass over a few tokens in one launch, for steps that the host queues.

A decoder layer is about a dozen kernels, which take microseconds each with few tokens and as long to launch. Steps of few tokens
are padded to few shapes (`StepShape.padded`), each of which is a graph: token ids, positions and lengths are in device memory,
which the host fills before a launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from tide_runtime.backends.device.control_flow import Compile, Launch, Run
from tide_runtime.errors import TargetError


class StepGraphs:
    """How steps of a backend are captured.

    Args:
        compile: captures a program without conditions; None: nothing is captured.

    Attributes:
        refused: why steps are queued graph by graph; None: they are captured, as far as is known.
        captured: steps captured so far.
    """

    def __init__(self, compile: Compile | None, refused: str | None = None) -> None:
        self._compile = compile
        self.refused = refused
        self.captured = 0

    @property
    def is_unset(self) -> bool:
        """Whether it is not known what this machine captures."""
        return self._compile is None and self.refused is None

    def __str__(self) -> str:
        """The end of a sentence about what drives decoding; empty while nothing is known."""
        if self.refused is not None:
            return f"; steps are queued graph by graph: {self.refused}"
        return "; steps are CUDA graphs" if self.captured else ""

    @property
    def captures(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self._compile is not None and self.refused is None

    def capture(self, program: Sequence[Run]) -> Launch | None:
        """The launch of ``program``, all of which has run before; None, after a warning, where it cannot be captured."""
        if self._compile is None or not self.captures:
            return None
        try:
            launch = self._compile(program).launch
        except TargetError as error:
            self.refused = str(error)
            warnings.warn(f"{error}; steps are queued graph by graph", RuntimeWarning, stacklevel=4)
            return None
        self.captured += 1
        return launch
