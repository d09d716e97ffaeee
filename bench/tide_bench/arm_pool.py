"""The pool of running arms: builds what they load, starts their processes, and records why one cannot run.

Nothing is timed here, so arms are prepared two at a time where memory allows: compilers and exporters run on one core. Arms that
run by torch keep to one core meanwhile: its threads wait for each other, ten times as long on cores that are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Lock

from tide_runtime import TideError
from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms import OURS
from tide_bench.arms.base import Timing, use_all_cores
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.arms.registry import POLICIES, ArmSpec
from tide_bench.bundles import export_cuts
from tide_bench.gguf_model import SUFFIX, find_gguf, huggingface_folder
from tide_bench.phases import Phases
from tide_bench.source_model import SourceModel

# TIDE's arm first, as static skip takes its depth from it; then what takes longest, so that nothing waits for it at the end.
_FIRST = (OURS, "compile")
_CUTS = ("unsplit", "static")  # bundles of our own exporter, made from one trace
_FROM_GGUF = ("llamacpp", "openvino")
_GENAI = {"genai": "fp32", "genai-int4": "int4"}
_BY_TORCH = ("eager", "predecessor")  # compiled code is for as many threads as it was compiled with


@dataclass(frozen=True)
class RunningArm:
    """An arm whose process runs."""

    spec: ArmSpec
    process: ArmProcess

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Raises ArmError when the arm fails or stops early."""
        return self.process.generate(prompts, new_tokens, **self.spec.options)


class ArmPool:
    """Processes by kind. ``failures``: name of an arm → why it cannot run.

    Args:
        source: the HuggingFace model, or why there is none here.
        kinds: of arms that will be started.
        depth: the layers that static skip is to run, from the mean depth of `exit`; called when the arm is made.
        lanes: arms that are prepared at once.
        gguf: the model as a GGUF file; None: the bundle's source, if it is one.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        source: SourceModel | str,
        cache: Path,
        kinds: Sequence[str],
        depth: Callable[[RunningArm], int],
        lanes: int,
        phases: Phases,
        gguf: Path | None = None,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._bundle, self._manifest, self._source, self._depth = bundle, manifest, source, depth
        self._gguf = gguf
        self._cache = cache / manifest.model.fingerprint[:16]
        self._kinds, self._lanes, self._phases = kinds, lanes, phases
        self._processes: dict[str, ArmProcess] = {}
        self._cuts, self._one_at_a_time = _Cuts(), Lock()

    def start(self, specs: Sequence[ArmSpec], rehearse: Callable[[RunningArm], None] = lambda entry: None) -> list[RunningArm]:
        """Start the arms that can run, and call ``rehearse`` with each; an arm that raises ArmError there is left out."""
        kinds = sorted({c.kind for c in specs}, key=lambda k: _FIRST.index(k) if k in _FIRST else len(_FIRST))
        groups = [[c for c in specs if c.kind == kind] for kind in kinds]
        alone = groups[: kinds[:1] == [OURS]]
        with ThreadPoolExecutor(self._lanes) as pool:
            ready = [
                *(self._ready(group, rehearse) for group in alone),
                *pool.map(lambda group: self._ready(group, rehearse), groups[len(alone) :]),
            ]
        entries = {entry.spec.name: entry for entry in chain(*ready)}
        return [entries[c.name] for c in specs if c.name in entries]

    def _ready(self, group: Sequence[ArmSpec], rehearse: Callable[[RunningArm], None]) -> list[RunningArm]:
        """Arms of one kind, which share its process."""
        entries = []
        for spec in group:
            try:
                entry = RunningArm(spec, self._process(spec.kind))
                rehearse(entry)
            except (TideError, ArmError, RuntimeError, ImportError) as error:
                self.note_failure(spec, _first_line(error))
            else:
                entries.append(entry)
        if entries and self._keeps_to_one_core(entries[0].spec.kind):
            try:
                entries[0].process.apply(use_all_cores)
            except ArmError as error:  # its process died in the rehearsal
                for entry in entries:
                    self.note_failure(entry.spec, _first_line(error))
                return []
        return entries

    def note_failure(self, spec: ArmSpec, reason: str) -> None:
        """Record why an arm failed, the first time. The other arms of a process that died fail at their next call."""
        self.failures.setdefault(spec.name, reason)

    def stop(self, kinds: Sequence[str]) -> None:
        """End the processes of these kinds."""
        for kind in kinds:
            if kind in self._processes:
                self._processes.pop(kind).close()

    def close(self) -> None:
        self.stop(list(self._processes))

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, by the bundle with every layer."""
        return float(self._process("tide").call("gap", list(text), one, other))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _process(self, kind: str) -> ArmProcess:
        if kind not in self._processes:
            with self._phases("make", kind):
                folder = self._folder(kind)
            with self._phases("load", kind):
                self._processes[kind] = ArmProcess(kind, folder, 1 if self._keeps_to_one_core(kind) else None)
        return self._processes[kind]

    def _keeps_to_one_core(self, kind: str) -> bool:
        """While it gets ready."""
        return self._lanes > 1 and kind in _BY_TORCH

    def _folder(self, kind: str) -> Path:
        """What the arm loads. Raises ArmError when it needs the model and there is none."""
        if kind == OURS:
            return self._bundle
        if kind in _FROM_GGUF:
            return find_gguf(self._gguf, self._manifest.model.source)
        if isinstance(self._source, str):
            raise ArmError(self._source)
        if kind in _CUTS:
            return self._cut(kind, self._source)
        weights = self._weights(self._source)
        if kind in _GENAI:
            from tide_bench.arms.genai import build_model_folder

            return build_model_folder(weights, self._source.identity, self._cache / kind, _GENAI[kind])
        return weights

    def _weights(self, source: SourceModel) -> Path:
        """The HuggingFace folder; made from a GGUF file when the model is one."""
        if source.folder.suffix != SUFFIX:
            return source.folder
        with self._one_at_a_time:
            return huggingface_folder(source.folder, source.identity, self._cache / "weights")

    def _cut(self, kind: str, source: SourceModel) -> Path:
        """The bundle of ``kind``; the first call makes the bundles of all such kinds."""
        with self._cuts.lock:
            if not self._cuts.wanted:
                self._cuts.wanted = self._cuts_wanted()
                at = dict(cut for cut in self._cuts.wanted.values() if isinstance(cut, tuple))
                form = (self._manifest.dtype, self._manifest.max_seq_len)
                self._cuts.made = export_cuts(source.folder, source.identity, at, *form)
        cut = self._cuts.wanted[kind]
        if isinstance(cut, ArmError):
            raise cut
        return self._cuts.made[cut[0]]

    def _cuts_wanted(self) -> dict[str, tuple[Path, str] | ArmError]:
        """Kind → the folder and the checkpoints of its bundle, or why they are unknown."""
        wanted: dict[str, tuple[Path, str] | ArmError] = {}
        for kind in (kind for kind in _CUTS if kind in self._kinds):
            try:
                layers = self._depth(RunningArm(POLICIES["exit"], self._process(OURS))) if kind == "static" else None
                wanted[kind] = (self._cache / kind, "none") if layers is None else (self._cache / f"{kind}_{layers}", str(layers))
            except ArmError as error:
                wanted[kind] = error
        return wanted


@dataclass
class _Cuts:
    """``wanted``: kind → (folder, checkpoints), or why not; ``made``: folder → bundle."""

    wanted: dict[str, tuple[Path, str] | ArmError] = field(default_factory=dict)
    made: dict[Path, Path] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


def with_options(specs: Mapping[str, ArmSpec], manifest: Manifest) -> dict[str, ArmSpec]:
    """``specs`` with the options that depend on the model: the layers that HF's early exit drafts with."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    layer = exits[0].checkpoint if exits else max(1, manifest.model.num_layers // 4)
    return {name: replace(c, options={"assistant_early_exit": layer}) if name == "assisted" else c for name, c in specs.items()}


def meetings(kinds: Sequence[str], most: int) -> list[list[str]]:
    """The kinds that are in memory together: the first kind always, with as many others as make ``most``."""
    pivot, *others = kinds
    size = max(1, most - 1)
    return [[pivot, *others[i : i + size]] for i in range(0, len(others), size)] or [[pivot]]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
