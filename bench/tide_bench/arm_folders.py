"""What each kind of arm loads: the bundle, the same model cut nowhere, its weights in the forms that other libraries read."""

from __future__ import annotations

from pathlib import Path

from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms import CPU, is_ours
from tide_bench.arms.process import ArmError
from tide_bench.bundles import export_bundle
from tide_bench.source_model import SUFFIX, SourceModel, find_gguf, huggingface_folder

_FROM_GGUF = ("llamacpp", "openvino")
_GENAI = {"genai": "fp32", "genai-int4": "int4"}


class ArmFolders:
    """Folders of arms on one bundle's model; they are made when they are asked for.

    Args:
        source: the HuggingFace model, or why there is none here.
        gguf: the model as a GGUF file; None: the bundle's source, if it is one.
        target: of the bundle that is cut nowhere.
    """

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        source: SourceModel | str,
        cache: Path,
        gguf: Path | None = None,
        target: str = CPU,
    ) -> None:
        self._bundle = bundle
        self._manifest = manifest
        self._source = source
        self._gguf, self._target = gguf, target
        self._cache = cache / manifest.model.fingerprint[:16]

    def __call__(self, kind: str) -> Path:
        """What the arm loads. Raises ArmError when it needs the model and there is none."""
        if is_ours(kind):
            return self._bundle
        if kind in _FROM_GGUF:
            return find_gguf(self._gguf, self._manifest.model.source)
        if isinstance(self._source, str):
            raise ArmError(self._source)
        if kind == "unsplit":
            return self._unsplit(self._source)
        weights = self._weights(self._source)
        if kind in _GENAI:
            from tide_bench.arms.genai import build_model_folder

            return build_model_folder(weights, self._source.identity, self._cache / kind, _GENAI[kind])
        return weights

    def _unsplit(self, source: SourceModel) -> Path:
        name = "unsplit" if self._target == CPU else f"unsplit_{self._target}"
        form = (self._manifest.dtype, self._manifest.max_seq_len)
        return export_bundle(source.folder, source.identity, self._cache / name, "none", *form, targets=(self._target,))

    def _weights(self, source: SourceModel) -> Path:
        """The HuggingFace folder; made from a GGUF file when the model is one."""
        if source.folder.suffix != SUFFIX:
            return source.folder
        return huggingface_folder(source.folder, source.identity, self._cache / "weights")
