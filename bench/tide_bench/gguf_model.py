"""The GGUF file that llama.cpp and OpenVINO read, and its weights as the HuggingFace folder that the other arms read."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from tide_runtime.errors import ModelFilesError

from tide_bench.build_cache import cached_folder
from tide_bench.in_process import run_in_process

SUFFIX = ".gguf"


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
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tide_export.quantization.gguf_tokenizer import read_gguf_tokenizer

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain fp32 now, but save_pretrained refuses a model that remembers its GGUF
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    if (tokenizer := read_gguf_tokenizer(gguf)) is not None:
        tokenizer.save_pretrained(folder)
