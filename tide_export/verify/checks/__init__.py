"""Checks of a loaded model against its files by another path than the loader's.

A bundle is compared with the model that it was made from, so what was loaded wrongly is equal in both, and most of it changes the
model's loss too little to show: these checks are the only ones that see it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tide_runtime.bundle.manifest import Manifest

from tide_export.load import quantization_method
from tide_export.sources.gguf.file import is_gguf, read_file
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.parameters import ParameterSource
from tide_export.verify.checks import rotary
from tide_export.verify.checks.stored_gguf import gguf_tensors
from tide_export.verify.checks.stored_values import StoredValues, safetensors_tensors
from tide_export.verify.checks.tokens import check_gguf_tokens, check_round_trips, check_tokenizer_file

_ROWS_AT_A_TIME = 8192  # rows of embedding or head that are compared at a time


def check_loaded(loaded: LoadedModel, own_tokenizer: bool) -> None:
    """Hold tokens and rotary frequencies against the model's files.

    ``own_tokenizer``: whether the tokenizer is the model's own. A model without files has nothing to be held against.

    Raises VerificationError, which names the check.
    """
    if not loaded.weight_files:
        return
    if own_tokenizer and loaded.tokenizer is not None:
        if _is_gguf(loaded):
            generation = loaded.model.generation_config
            eos = generation.eos_token_id if generation is not None else None
            ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
            check_gguf_tokens(loaded.tokenizer, read_file(loaded.weight_files[0])[0], ends)
            check_round_trips(loaded.tokenizer)  # it was built here; a tokenizer.json is the model's own, whatever it loses
        elif (file := Path(loaded.source) / "tokenizer.json").is_file():
            check_tokenizer_file(loaded.tokenizer, file)
    rotary.check_eager(loaded.model, _rotations(loaded))


def check_tables(loaded: LoadedModel, directory: Path, manifest: Manifest) -> None:
    """Hold the bundle's tables of cos and sin against the model's files. Raises VerificationError where one differs."""
    if loaded.weight_files:
        rotary.check_tables(directory, manifest, _rotations(loaded))


def stored_values(loaded: LoadedModel) -> StoredValues | None:
    """What compares parameters with the model's files; None where they are not comparable, as other methods packed them."""
    if not loaded.weight_files:
        return None
    if _is_gguf(loaded):
        tensors = gguf_tensors(loaded.weight_files[0], loaded.model)
    elif quantization_method(loaded.model.config) is None:
        tensors = safetensors_tensors(loaded.weight_files, loaded.model)
    else:
        return None
    made_here = {name for name, weight in loaded.quantized.items() if weight.origin.startswith("int")}
    return StoredValues.of(tensors, made_here.__contains__)


def compare_rest(values: StoredValues, source: ParameterSource) -> None:
    """Compare what a pass has not read as a whole: embedding and head, some rows at a time, and all of a model in memory."""
    for name in sorted(values.tensors.keys() - values.compared):
        shape = values.tensors[name].shape
        step, share = (_ROWS_AT_A_TIME, values.share) if len(shape) > 1 else (shape[0], 1)
        for first in range(0, shape[0], step):
            count = min(max(1, step // share), shape[0] - first)
            values.compare_rows(name, source.rows(name, first, count), np.arange(first, first + count))


def _is_gguf(loaded: LoadedModel) -> bool:
    return is_gguf(str(loaded.weight_files[0]))


def _rotations(loaded: LoadedModel) -> dict[str, rotary.Rotation]:
    if _is_gguf(loaded):
        return rotary.gguf_rotations(loaded.model, *read_file(loaded.weight_files[0]))
    return rotary.config_rotations(loaded.model)
