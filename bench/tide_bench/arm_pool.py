"""The pool of running arms: builds what they load, starts their processes, and records why one cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from tide_runtime import TideError
from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms import POLICIES, ArmSpec
from tide_bench.arms.base import ArmDevice, Timing
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.report import Phases

_CANNOT_RUN = (TideError, ArmError, RuntimeError, ImportError)
_LOADS = 3  # loads of a model over which its load time is measured


@dataclass(frozen=True)
class RunningArm:
    """An arm whose process runs."""

    spec: ArmSpec
    process: ArmProcess

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Raises ArmError when the arm fails or stops early."""
        return self.process.generate(prompts, new_tokens, **self.spec.options)

    def load_seconds(self) -> float:
        """Seconds to load its model once more, files and libraries in memory, and make two tokens."""
        return float(self.process.apply(_load_seconds))


class ArmPool:
    """Processes of arms. ``failures``: name of an arm → why it cannot run.

    Args:
        folder: makes what a process loads, given its name (`ArmSpec.process`). Raises ArmError or TideError where it cannot.
        device: where arms run, and the target of those of TIDE's that name none; None: the CPU.
    """

    def __init__(self, folder: Callable[[str], Path], phases: Phases, device: ArmDevice | None = None) -> None:
        self.failures: dict[str, str] = {}
        self._folder = folder
        self._phases = phases
        self._device = device or ArmDevice()
        self._processes: dict[str, ArmProcess] = {}
        self._absent: dict[str, str] = {}  # process → why it could not be started

    def start(self, specs: Sequence[ArmSpec], rehearse: Callable[[RunningArm], None] = lambda entry: None) -> list[RunningArm]:
        """Start the arms that can run, and call ``rehearse`` with each; an arm that raises ArmError there is left out."""
        entries = []
        for spec in specs:
            try:
                entry = self.running(spec)
                rehearse(entry)
            except _CANNOT_RUN as error:
                self.note_failure(spec, _first_line(error))
            else:
                entries.append(entry)
        return entries

    def note_failure(self, spec: ArmSpec, reason: str) -> None:
        """Record why an arm failed, the first time. The other arms of a process that died fail at their next call."""
        self.failures.setdefault(spec.name, reason)

    def running(self, spec: ArmSpec) -> RunningArm:
        """The arm, its process started when it is not there. Raises what the maker of its folder raises, and ArmError; a process
        that could not be started is not tried again."""
        if spec.process in self._absent:
            raise ArmError(self._absent[spec.process])
        if spec.process not in self._processes:
            try:
                self._processes[spec.process] = self._started(spec)
            except _CANNOT_RUN as error:
                self._absent[spec.process] = _first_line(error)
                raise
        return RunningArm(spec, self._processes[spec.process])

    def _started(self, spec: ArmSpec) -> ArmProcess:
        with self._phases("make", spec.process):
            folder = self._folder(spec.process)
        with self._phases("load", spec.process):
            device = replace(self._device, target=spec.target) if spec.target else self._device
            return ArmProcess(spec.kind, folder, device=device)

    def stop(self, names: Iterable[str]) -> None:
        """End the processes of these names."""
        for name in names:
            if name in self._processes:
                self._processes.pop(name).close()

    def close(self) -> None:
        self.stop(list(self._processes))

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, by the bundle with every layer."""
        return float(self.running(POLICIES["full"]).process.call("gap", list(text), one, other))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]


def with_options(specs: Mapping[str, ArmSpec], manifest: Manifest) -> dict[str, ArmSpec]:
    """``specs`` with the options that depend on the model: the layers that HF's early exit drafts with."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    layer = exits[0].checkpoint if exits else max(1, manifest.model.num_layers // 4)
    return {name: replace(c, options={"assistant_early_exit": layer}) if name == "assisted" else c for name, c in specs.items()}


def meetings(names: Sequence[str], most: int) -> list[list[str]]:
    """The processes that are in memory together: the first one always, with as many others as make ``most``."""
    pivot, *others = names
    size = max(1, most - 1)
    return [[pivot, *others[i : i + size]] for i in range(0, len(others), size)] or [[pivot]]


def _load_seconds(arm: Any) -> float:
    """Runs in the arm's process. TIDE's arm loads its model twice when it is made, see `tide_bench.arms.tide.load_second`."""
    again = getattr(arm, "load_again", lambda prompts, count: type(arm)(arm.folder).generate(prompts, count))
    times = []
    for _ in range(_LOADS):
        begin = perf_counter()
        again([[1] * 64], 2)
        times.append(perf_counter() - begin)
    return median(times)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
