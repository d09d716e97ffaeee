"""A model that is loaded when it is needed: its bundle on disk, what it takes of the memory, and its engine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tide_runtime import Engine, EngineOptions
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import MANIFEST_NAME
from tide_runtime.engine_memory import EngineMemory
from tide_runtime.targets.target_choice import DeviceChoice, choose_target
from tide_runtime.text.tokenizer import Tokenizer

_PROCESSOR = "onnxruntime-cpu"
_Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, inode, bytes, time of change


@dataclass(frozen=True)
class LoadPlan:
    """A bundle as it is on the disk now.

    Args:
        options: of its engine, with the target and the budget for keys and values.
        bytes: what the engine takes.
    """

    bundle: Bundle
    options: EngineOptions
    bytes: int

    @property
    def on_device(self) -> bool:
        """Whether it takes the memory of a device other than the processor."""
        return self.bundle.manifest.targets[self.options.target].backend != _PROCESSOR


@dataclass
class BundleSource:
    """The bundle in ``directory``, whose engine of ``options`` may take ``limit`` bytes.

    Its files are compared with their SHA-256, where the options say so, when it is first loaded and when they have changed. What
    was read of them is kept until then, the tokenizer above all: while one is read, which holds Python's lock, all answers wait.
    """

    directory: Path
    options: EngineOptions
    limit: int
    _verified: tuple[_Stamp, LoadPlan] | None = field(default=None, init=False)
    _tokenizer: Tokenizer | None = field(default=None, init=False)

    def sized(self) -> LoadPlan:
        """The plan, from the manifest and the sizes of the files.

        Raises BundleError; TargetError where no target runs here; what `EngineMemory.within` raises.
        """
        bundle = Bundle.open(self.directory, verify=False)
        options = self.options
        if options.target == "auto":
            options = replace(options, target=choose_target(bundle.manifest, DeviceChoice.parse(options.device)))
        memory = EngineMemory.within(self.limit, bundle, options)
        return LoadPlan(bundle, memory.applied(options), memory.total)

    def verified(self) -> LoadPlan:
        """The plan, of checked files. Raises BundleError for one that was changed, and what `sized` raises."""
        if self._verified is not None and self._verified[0] == _stamp(self._verified[1].bundle):
            return self._verified[1]
        self._verified = self._tokenizer = None
        stamp = _stamp(Bundle.open(self.directory, verify=False))  # first: a change while files are read is seen the next time
        plan = self.sized()
        if self.options.verify:
            Bundle.open(self.directory)
        self._verified = stamp, plan
        return plan

    def load(self, plan: LoadPlan) -> Engine:
        """The engine of ``plan``. Raises BundleError, TargetError."""
        engine = Engine(plan.bundle, plan.options, tokenizer=self._tokenizer)
        self._tokenizer = engine.tokenizer
        return engine


def _stamp(bundle: Bundle) -> _Stamp:
    """The stamp of the manifest and of the files in it; a file that is gone has no entry."""
    found = []
    for name in (MANIFEST_NAME, *bundle.manifest.files):
        with suppress(OSError):
            state = bundle.path(name).stat()
            found.append((name, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
