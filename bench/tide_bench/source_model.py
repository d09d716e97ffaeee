"""The model that a bundle was made from: where it lies, and that it is the same one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tide_runtime.bundle.manifest import ModelInfo
from tide_runtime.errors import ModelFilesError

from tide_bench.in_process import run_in_process


@dataclass(frozen=True)
class SourceModel:
    """``folder``: config and weights, or a GGUF file; ``identity``: changes when the weights do."""

    folder: Path
    identity: str


def find_source(model: ModelInfo, given: str | None) -> SourceModel:
    """The model ``given`` (a directory or hub id), or the one that the manifest names.

    Raises ModelFilesError when it cannot be read here, or is another model than the bundle's.
    """
    source = given or model.source
    try:
        folder, fingerprint = run_in_process(_locate, source, model.revision)
    except ImportError as error:
        raise ModelFilesError(f"the model cannot be read without torch ({error}); pip install 'tide-llm[bench]'") from error
    except ModelFilesError as error:
        raise ModelFilesError(f"{error}; give the model the bundle was made from with --model") from error
    if fingerprint != model.fingerprint:
        raise ModelFilesError(f"{source} has other weights than the bundle's model {model.name}; give that one with --model")
    return SourceModel(folder, fingerprint)


def _locate(source: str, revision: str | None) -> tuple[Path, str]:
    from tide_export.load import fingerprint, load_model

    loaded = load_model(source, "fp32", revision)
    folder = Path(source) if Path(source).exists() else loaded.weight_files[0].parent
    return folder.resolve(), fingerprint(loaded)
