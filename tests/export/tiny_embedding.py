"""Folders of tiny random embedding models as sentence-transformers saves them, and vectors made by transformers and by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from export.architectures import FEW_LAYERS, MAX_POSITIONS, tiny_model
from numpy.typing import NDArray
from tiny_tokenizer import write_byte_tokenizer
from tokenizers import Tokenizer, processors
from transformers import PreTrainedModel

from tide_export.config import ExportConfig

END = 127  # the token that ends each text, as Qwen3-Embedding's tokenizer has one
POOLINGS = {"last": {"pooling_mode_lasttoken": True}, "mean": {"pooling_mode_mean_tokens": True}}
NORMALIZED = ("Transformer", "Pooling", "Normalize")
CONFIG = ExportConfig(max_seq_len=MAX_POSITIONS // 2, targets=("cpu",))


def write_embedding_model(
    folder: Path,
    architecture: str = "qwen3",
    pooling: dict[str, Any] | None = None,
    modules: Sequence[str] = NORMALIZED,
    bare: bool = True,
    prompts: dict[str, Any] | None = None,
    **config: Any,
) -> PreTrainedModel:
    """Write a model with its files of sentence-transformers; returns it.

    Args:
        pooling: what 1_Pooling/config.json holds.
        bare: the files have no head, and no ``model.`` before their names.
        prompts: what config_sentence_transformers.json holds.
        config: further settings of config.json.
    """
    model = tiny_model(architecture, layers=FEW_LAYERS)
    (model.base_model if bare else model).save_pretrained(folder)
    if config:
        _write(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **config})
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_pooling(folder, POOLINGS["last"] if pooling is None else pooling, modules)
    if prompts is not None:
        _write(folder / "config_sentence_transformers.json", prompts)
    return model


def write_pooling(folder: Path, pooling: dict[str, Any], modules: Sequence[str] = NORMALIZED) -> None:
    """Write sentence-transformers' files beside a model; arguments as in `write_embedding_model`."""
    kinds = [(f"{i}_{kind}" if i else "", f"sentence_transformers.models.{kind}") for i, kind in enumerate(modules)]
    _write(folder / "modules.json", [{"path": path, "type": kind} for path, kind in kinds])
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling/config.json", pooling)


def ids_of(text: str) -> list[int]:
    """Token ids of an ASCII text."""
    return [*text.encode("ascii"), END]


def embedded(model: PreTrainedModel, texts: Sequence[Sequence[int]], pooling: str) -> NDArray[np.float32]:
    """Vectors [N, H] of token ids, of length 1, by transformers, each text alone."""
    vectors = []
    for ids in texts:
        with torch.no_grad():
            states = model.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
        vector = states[-1] if pooling == "last" else states.mean(0)
        vectors.append(vector / vector.norm())
    return torch.stack(vectors).numpy()


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
