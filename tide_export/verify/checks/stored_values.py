"""Hold parameters against the numbers in the model's files, read by another path than the loader's.

A wrong order of the rows of one matrix, or another layer's norm, changes a model's loss by less than a hundredth, and nothing but
this sees it. The tensors of GGUF files: `stored_gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tide_runtime.errors import VerificationError
from torch import Tensor
from transformers import PreTrainedModel

from tide_export.sources.accounting import tensors_by_parameter

_WHOLE = 1 << 28  # numbers of a model that are all compared; of larger ones a share of the rows
_NEARLY = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # relative, of the largest value of a row
_ROUNDED = 1.0  # the same of the root mean square, for weights quantised here: a wrong row is off by 1.4

Rows = NDArray[np.int64]


class StoredTensor(Protocol):
    """A tensor of a file in the shape of the parameter."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, rows: Rows) -> NDArray[np.float32]:
        """Some rows of it, in fp32."""


@dataclass(frozen=True)
class _SafetensorsRows:
    file: Path
    name: str
    shape: tuple[int, ...]

    def rows(self, rows: Rows) -> NDArray[np.float32]:
        with safe_open(self.file, framework="pt") as opened:
            part = opened.get_slice(self.name)
            first, last = int(rows[0]), int(rows[-1])
            return part[first : last + 1][torch.from_numpy(rows - first)].float().numpy()


def safetensors_tensors(files: tuple[Path, ...], model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Parameter name → the tensor that it is; parameters that are made of several, as experts may be, have none."""
    found: dict[str, StoredTensor] = {}
    holder: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            holder |= {name: (file, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()}  # noqa: SIM118
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for parameter, tensors in tensors_by_parameter(model, holder).items():
        if len(tensors) == 1 and shapes.get(parameter) == holder[tensors[0]][1]:
            found[parameter] = _SafetensorsRows(holder[tensors[0]][0], tensors[0], shapes[parameter])
    return found


@dataclass(frozen=True)
class StoredValues:
    """Compares parameters with the tensors that they come from; `compare` raises, and ``compared`` has the names that passed.

    Args:
        tensors: by parameter name.
        is_rounded: whether a parameter was quantised after it was read.
        share: one of so many rows is compared.
    """

    tensors: Mapping[str, StoredTensor]
    is_rounded: Callable[[str], bool]
    share: int
    compared: set[str]

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor], is_rounded: Callable[[str], bool]) -> StoredValues:
        numbers = sum(int(np.prod(tensor.shape)) for tensor in tensors.values())
        return cls(tensors, is_rounded, -(-numbers // _WHOLE), set())

    def compare(self, name: str, value: Tensor) -> None:
        """`compare_rows` of a ``share`` of the rows of ``value``, the parameter, when it is read first: loops read it again."""
        if name in self.compared:
            return
        step = self.share if value.ndim > 1 else 1
        self.compare_rows(name, value[::step], np.arange(0, len(value), step))

    def compare_rows(self, name: str, values: Tensor, rows: Rows) -> None:
        """``values``: those of the parameter's ``rows``.

        Raises VerificationError with the names of parameter and tensor where they differ.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        found = values.float().numpy()
        expected = tensor.rows(rows)
        if found.shape != expected.shape:
            raise VerificationError(
                f"values: {name} has rows of {found.shape[1:]}, and {tensor.name} of the model's file of {expected.shape[1:]}"
            )
        wrong = _wrong_rows(found, expected, None if self.is_rounded(name) else _NEARLY[values.dtype])
        if wrong.any():
            raise VerificationError(
                f"values: {name} is not {tensor.name} of the model's file: row {rows[int(wrong.argmax())]} differs, and "
                f"{wrong.mean():.0%} of those compared. The model was loaded wrongly: please report its config and the versions "
                "of transformers and gguf; --no-verify writes the bundle all the same"
            )
        self.compared.add(name)


def _wrong_rows(found: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float | None) -> NDArray[np.bool_]:
    """[N]; a vector is one row. ``tolerance`` None: values that were quantised."""
    width = expected[0].size if expected.ndim > 1 else expected.size
    difference = np.abs(found - expected).reshape(-1, width)
    size = np.abs(expected).reshape(-1, width)
    if tolerance is None:
        return ~((difference**2).mean(1) <= _ROUNDED**2 * (size**2).mean(1))
    return ~(difference.max(1) <= tolerance * size.max(1))
