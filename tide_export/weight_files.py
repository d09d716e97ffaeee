"""The safetensors files of a checkpoint, and what their headers say of each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from tide_runtime.errors import ModelFilesError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files


@dataclass(frozen=True)
class TensorHeader:
    """``dtype``: safetensors' name of it, such as BF16."""

    shape: tuple[int, ...]
    dtype: str


def weight_files(source: str, revision: str | None) -> tuple[Path, ...]:
    """The files that hold the weights of a directory or hub id; those of a hub model are cached once it was loaded.

    AutoGPTQ named its only file after bits and group size. Empty if a hub model's file has another name (a converted pull
    request).
    """
    whole, index = (
        cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if whole:
        return (Path(whole),)
    if index:
        return tuple(Path(file) for file in get_checkpoint_shard_files(source, index, revision=revision)[0])
    return tuple(sorted(Path(source).glob("*.safetensors")))


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Every tensor by name. Raises ModelFilesError if two files hold one: loaders take either, and they may differ."""
    headers: dict[str, TensorHeader] = {}
    holder: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name in holder:
                    raise ModelFilesError(
                        f"{file.name} and {holder[name].name} both hold {name}; delete the shards of an older save, or download "
                        "the model again"
                    )
                part = opened.get_slice(name)
                holder[name], headers[name] = file, TensorHeader(tuple(part.get_shape()), part.get_dtype())
    return headers
