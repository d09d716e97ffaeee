"""Gets contestants ready: makes what they load, starts their processes, and notes why one cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tide_runtime import TideError
from tide_runtime.manifest import Manifest

from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.bundles import build_unsplit, export_bundle
from tide_bench.contestants import Contestant
from tide_bench.source_model import SourceModel

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A contestant whose process runs."""

    contestant: Contestant
    process: ArmProcess

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Raises ArmError when the arm fails or stops early."""
        return self.process.generate(prompts, new_tokens, **self.contestant.options)


class Stage:
    """Processes by kind. ``failures``: contestant → why it cannot run.

    Args:
        source: the HuggingFace model, or why there is none here.
        depth: gives the layers that static skip is to run, after how many `exit` ran; asked when the arm is made.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        source: SourceModel | str,
        cache: Path,
        depth: Callable[[], int],
        announce: Announce,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._bundle, self._manifest, self._source, self._depth = bundle, manifest, source, depth
        self._cache = cache / manifest.model.fingerprint[:16]
        self._processes: dict[str, ArmProcess] = {}
        self._announce = announce

    def enter(self, contestants: Sequence[Contestant]) -> list[Entry]:
        """Start those that can run."""
        entries = []
        for contestant in contestants:
            try:
                entries.append(Entry(contestant, self._process(contestant.kind)))
            except (TideError, ArmError, RuntimeError, ImportError) as error:
                self.failures[contestant.name] = _first_line(error)
        return entries

    def withdraw(self, entry: Entry, reason: str) -> None:
        """Note that an arm failed on the way; a process that died takes its other contestants along when they are asked."""
        self.failures[entry.contestant.name] = reason

    def leave(self, kinds: Sequence[str]) -> None:
        """End the processes of these kinds."""
        for kind in kinds:
            if kind in self._processes:
                self._processes.pop(kind).close()

    def close(self) -> None:
        self.leave(list(self._processes))

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, by the bundle with every layer."""
        return float(self._process("tide").call("gap", list(text), one, other))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _process(self, kind: str) -> ArmProcess:
        if kind not in self._processes:
            self._announce(f"preparing {kind}")
            self._processes[kind] = ArmProcess(kind, self._folder(kind))
        return self._processes[kind]

    def _folder(self, kind: str) -> Path:
        """What the arm loads. Raises ArmError when it needs the model and there is none."""
        if kind == "tide":
            return self._bundle
        if isinstance(self._source, str):
            raise ArmError(self._source)
        weights, identity = self._source.folder, self._source.identity
        form: dict[str, Any] = {"dtype": self._manifest.dtype, "max_seq_len": self._manifest.max_seq_len}
        if kind == "unsplit":
            return build_unsplit(weights, identity, self._cache / "unsplit", **form)
        if kind == "static":
            layers = str(self._depth())
            return export_bundle(weights, identity, self._cache / f"static_{layers}", layers, **form)
        if kind == "genai":
            from tide_bench.arms.genai import build_model_folder

            return build_model_folder(weights, identity, self._cache / "genai")
        return weights


def with_options(contestants: Mapping[str, Contestant], manifest: Manifest) -> dict[str, Contestant]:
    """``contestants`` with what depends on the model: the layers that HF's early exit drafts with."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    layer = exits[0].checkpoint if exits else max(1, manifest.model.num_layers // 4)
    return {
        name: replace(c, options={"assistant_early_exit": layer}) if name == "assisted" else c for name, c in contestants.items()
    }


def meetings(kinds: Sequence[str], most: int) -> list[list[str]]:
    """Who is in memory together: the first kind always, with as many others as make ``most``."""
    pivot, *others = kinds
    size = max(1, most - 1)
    return [[pivot, *others[i : i + size]] for i in range(0, len(others), size)] or [[pivot]]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
