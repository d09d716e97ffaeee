"""Show the builder's progress on the exporter's bar and pass Ctrl-C on to the builder, as a build may take minutes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tide_export.progress import Steps


def build_progress(trt: Any, steps: Steps) -> Any:
    """A progress monitor of module ``trt`` that moves ``steps`` with the outermost phase in progress.

    It raises nothing, because the builder is C++: an interrupted build ends after its current step.
    """

    class BuildProgress(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with suppress(KeyboardInterrupt):
                if self.outermost is None:
                    self.outermost = phase_name
                    steps.begin(num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with suppress(KeyboardInterrupt):
                if phase_name == self.outermost:
                    steps.reach(step + 1)
            return not steps.interrupted

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == self.outermost:
                self.outermost = None

    return BuildProgress()
