"""Faults planted in what reads a GGUF file: each makes a model that equals its bundle, and the export has to refuse it by name.

The loader, or the reader of the tokenizer, gets another content than the file has; the checks read the file themselves. A fault
in the mapping of blocks or in a bundle's tables is planted where they are made.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import TideError

from tide_export.config import ExportConfig
from tide_export.export import export
from tide_export.sources.gguf.file import _FORMATS, GgufTensor, Metadata

LAYER = 1  # of the faults in one layer
Tensors = dict[str, GgufTensor]


@dataclass(frozen=True)
class Fault:
    """``plant``: context in which the export has the fault; ``check``: how the error begins to say what is wrong."""

    name: str
    plant: Callable[[], AbstractContextManager[None]]
    check: str

    def __str__(self) -> str:
        return self.name


def read_otherwise(module: str, edit: Callable[[dict[str, Any], Tensors], object]) -> AbstractContextManager[Any]:
    """Context in which ``module`` reads files whose keys and tensors ``edit`` has changed."""
    owner = importlib.import_module(f"tide_export.sources.gguf.{module}")
    honest = owner.read_file

    def read(path: Path) -> tuple[Metadata, Tensors]:
        keys, tensors = honest(path)
        values, edited = dict(keys._values), dict(tensors)
        edit(values, edited)
        return Metadata(keys.file, values), edited

    return patch.object(owner, "read_file", read)


def tensor(name: str, edit: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """The loader reads other numbers, or rows of blocks, for the tensor ``name``."""

    def change(_values: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = replace(tensors[name], data=edit(tensors[name].data))

    return lambda: read_otherwise("source", change)


def of_other_tensor(name: str, other: str) -> Callable[[], AbstractContextManager[Any]]:
    def change(_values: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = replace(tensors[other], name=name)

    return lambda: read_otherwise("source", change)


def key(name: str, edit: Callable[[Any], Any], module: str = "source") -> Callable[[], AbstractContextManager[Any]]:
    """``module`` reads another value of the key ``name``."""

    def change(values: dict[str, Any], _tensors: Tensors) -> None:
        values[name] = edit(values.get(name))

    return lambda: read_otherwise(module, change)


def without_factors() -> AbstractContextManager[Any]:
    return read_otherwise("source", lambda _values, tensors: tensors.pop("rope_freqs.weight"))


@contextmanager
def zero_points_off() -> Iterator[None]:
    """Off by one in one block of each matrix, in the form that the bundle has."""

    def off(read: Callable) -> Callable:
        def damaged(kind: str, blocks: NDArray[np.uint8]) -> Any:
            weight = read(kind, blocks)
            default = np.full(weight.scales.shape, 1 << (weight.bits - 1), np.uint8)
            zeros = default if weight.zero_points is None else weight.zero_points.copy()
            zeros[len(zeros) // 2, -1] ^= 1
            return replace(weight, zero_points=zeros)

        return damaged

    with patch.dict(_FORMATS, {kind: off(read) for kind, read in _FORMATS.items()}):
        yield


def late_angles() -> AbstractContextManager[Any]:
    """The kernels' tables begin anew in the middle, which no prompt of the verification of SmolLM2 reaches."""
    gqa = importlib.import_module("tide_export.passes.attention_gqa")
    honest = gqa.rotary_tables

    def tables(*arguments: Any) -> Any:
        cos, sin = honest(*arguments)
        cos[len(cos) // 2 :] = cos[: -(-len(cos) // 2)]
        return cos, sin

    return patch.object(gqa, "rotary_tables", tables)


def _random(data: NDArray[Any]) -> NDArray[Any]:
    return data[np.random.default_rng(0).permutation(len(data))]


def _swapped(data: NDArray[Any]) -> NDArray[Any]:
    """The rows of one head, as transformers has them, where llama.cpp's order is expected."""
    other = data.copy()
    other[0:16:2], other[1:16:2] = data[0:8], data[8:16]
    return other


def _layer(part: str, layer: int = LAYER) -> str:
    return f"blk.{layer}.{part}.weight"


TENSORS = (
    Fault("a v projection has its rows at random", tensor(_layer("attn_v"), _random), "values: "),
    Fault("rows of q in another order in one layer", tensor(_layer("attn_q"), _swapped), "values: "),
    Fault("rows of k in another order in one layer", tensor(_layer("attn_k"), _swapped), "values: "),
    Fault("the norm of another layer", of_other_tensor(_layer("ffn_norm"), _layer("ffn_norm", 0)), "values: "),
    Fault("the final norm is ones", tensor("output_norm.weight", np.ones_like), "values: "),
    Fault("two tokens of the embedding swapped", tensor("token_embd.weight", lambda d: d[[1, 0, *range(2, len(d))]]), "values: "),
    Fault("a tensor is not read", lambda: read_otherwise("source", lambda _v, t: t.pop(_layer("ffn_up"))), "has no tensor"),
)
KEYS = (
    Fault("theta a tenth", key("llama.rope.freq_base", lambda base: base / 10), "rotary embedding: "),
    Fault("linear scaling by 2", key("llama.rope.scaling.factor", lambda _: 2.0), "rotary embedding: "),
    Fault("an unknown key", key("llama.attention.gate", lambda _: 1), "is a key that nothing applies"),
    Fault("kernel tables wrong at late positions", late_angles, "rotary embedding: "),
)
TOKENS = (
    Fault("token ids shifted by one", key("tokenizer.ggml.tokens", lambda t: [*t[1:], t[0]], "tokenizer"), "tokens: "),
    Fault("two tokens swapped", key("tokenizer.ggml.tokens", lambda t: [t[1], t[0], *t[2:]], "tokenizer"), "tokens: "),
    Fault("control tokens are plain", key("tokenizer.ggml.token_type", lambda t: [1] * len(t), "tokenizer"), "tokens: "),
    Fault("the last merge is lost", key("tokenizer.ggml.merges", lambda m: m[:-1], "tokenizer"), "tokens: the merges"),
)
BLOCKS = (Fault("a zero point off by one", zero_points_off, ""),)
FACTORS = (Fault("frequency factors dropped", without_factors, "rotary embedding: "),)


def caught_by(fault: Fault, file: Path, config: ExportConfig, in_place: Callable[[], None] | None = None) -> str | None:
    """The error of the export of ``file`` with the fault, as a message; None if there is none. ``in_place``: see `export`."""
    with tempfile.TemporaryDirectory() as folder, fault.plant():
        try:
            export(str(file), Path(folder) / "bundle", config, in_place=in_place)
        except TideError as error:
            assert not any(Path(folder).iterdir()), "the bundle is still there"
            return str(error)
    return None
