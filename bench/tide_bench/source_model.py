"""The model that a bundle was made from: where it lies, that it is the same one, and its weights as every library reads them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tide_runtime.bundle.manifest import ModelInfo
from tide_runtime.errors import ModelFilesError

from tide_bench.build_cache import cached_folder, run_in_process

SUFFIX = ".gguf"


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
    if fingerprint != (model.source_fingerprint or model.fingerprint):
        raise ModelFilesError(f"{source} has other weights than the bundle's model {model.name}; give that one with --model")
    return SourceModel(folder, fingerprint)


def _locate(source: str, revision: str | None) -> tuple[Path, str]:
    from tide_export.load import fingerprint, load_model

    loaded = load_model(source, "fp32", revision)
    folder = Path(source) if Path(source).exists() else loaded.weight_files[0].parent
    return folder.resolve(), fingerprint(loaded)


def find_gguf(given: Path | None, source: str) -> Path:
    """The file ``given``, else the bundle's ``source`` when it is a GGUF file. Raises ModelFilesError without one."""
    file = given or Path(source)
    if file.suffix != SUFFIX:
        raise ModelFilesError(f"it reads {SUFFIX} files and the bundle was made from {source}; give the model's with --gguf")
    if not file.is_file():
        raise ModelFilesError(f"there is no file {file}; give the model's {SUFFIX} file with --gguf")
    return file


def huggingface_folder(gguf: Path, identity: str, folder: Path) -> Path:
    """The model of ``gguf`` in ``folder``: config, tokenizer, and weights in fp32, whatever they are in the file."""
    key = f"{identity}\n" + ", ".join(f"{name} {version(name)}" for name in ("tide-llm", "transformers", "gguf", "tokenizers"))
    return cached_folder(folder, key, lambda empty: run_in_process(_dequantise, gguf, empty))


def _dequantise(gguf: Path, folder: Path) -> None:
    import accelerate  # noqa: F401  # without it transformers refuses a GGUF file by a ValueError, which ends the whole comparison
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tide_export.sources.gguf.tokenizer import read_gguf_tokenizer

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain fp32 now, but save_pretrained refuses a model that remembers its GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    if (tokenizer := read_gguf_tokenizer(gguf)) is not None:
        tokenizer.save_pretrained(folder)
