"""What each kind of arm loads: the bundle, others made of the same model, its weights in the forms that other libraries read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms import CPU, is_ours
from tide_bench.arms.process import ArmError
from tide_bench.bundles import export_cuts
from tide_bench.source_model import SUFFIX, SourceModel, find_gguf, huggingface_folder

_CUTS = ("unsplit", "static")  # bundles of our own exporter, made from one trace
_FROM_GGUF = ("llamacpp", "openvino")
_GENAI = {"genai": "fp32", "genai-int4": "int4"}


class ArmFolders:
    """Folders of arms on one bundle's model; they are made when they are asked for.

    Args:
        source: the HuggingFace model, or why there is none here.
        kinds: of arms that will be started.
        depth: the layers that static skip is to run, from the mean depth of `exit`; called when the arm is made.
        gguf: the model as a GGUF file; None: the bundle's source, if it is one.
        target: of bundles that are made here.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        source: SourceModel | str,
        cache: Path,
        kinds: Sequence[str],
        depth: Callable[[], int],
        gguf: Path | None = None,
        target: str = CPU,
    ) -> None:
        self._bundle, self._manifest, self._source, self._depth = bundle, manifest, source, depth
        self._gguf, self._kinds, self._target = gguf, kinds, target
        self._cache = cache / manifest.model.fingerprint[:16]
        self._cuts, self._one_at_a_time = _Cuts(), Lock()

    def __call__(self, kind: str) -> Path:
        """What the arm loads. Raises ArmError when it needs the model and there is none."""
        if is_ours(kind):
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
                self._cuts.made = export_cuts(source.folder, source.identity, at, *form, self._target)
        cut = self._cuts.wanted[kind]
        if isinstance(cut, ArmError):
            raise cut
        return self._cuts.made[cut[0]]

    def _cuts_wanted(self) -> dict[str, tuple[Path, str] | ArmError]:
        """Kind → the folder and the checkpoints of its bundle, or why they are unknown."""
        wanted: dict[str, tuple[Path, str] | ArmError] = {}
        for kind in (kind for kind in _CUTS if kind in self._kinds):
            try:
                layers = self._depth() if kind == "static" else None
                name = (kind if layers is None else f"{kind}_{layers}") + ("" if self._target == CPU else f"_{self._target}")
                wanted[kind] = (self._cache / name, "none" if layers is None else str(layers))
            except ArmError as error:
                wanted[kind] = error
        return wanted


@dataclass
class _Cuts:
    """``wanted``: kind → (folder, checkpoints), or why not; ``made``: folder → bundle."""

    wanted: dict[str, tuple[Path, str] | ArmError] = field(default_factory=dict)
    made: dict[Path, Path] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
