"""Random weights in the layouts of quantised checkpoints, for formats that no installed package writes.

Every packer takes output and input features N, K of a matrix. Scales give weights a standard deviation of about 0.04.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]
GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an int32, from the lowest bits on
_SUPER_BLOCK = 256


def _halves(scale: float, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """fp16 numbers around ``scale`` as bytes [*shape, 2]."""
    return (scale * rng.uniform(0.5, 1.5, (*shape, 1))).astype(np.float16).view(np.uint8)


def _q4_k(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[N, bytes]: per super-block scale, minimum, 12 bytes of scales of 6 bits, 128 bytes of values."""
    shape = (rows, columns // _SUPER_BLOCK)
    blocks = [_halves(2e-4, shape, rng), _halves(1.5e-3, shape, rng), rng.integers(0, 256, (*shape, 140), np.uint8)]
    return np.concatenate(blocks, -1).reshape(rows, -1)


def _q6_k(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[N, bytes]: per super-block 128 + 64 bytes of values, 16 int8 scales, the scale of these."""
    shape = (rows, columns // _SUPER_BLOCK)
    scales = rng.integers(-32, 32, (*shape, 16), np.int8).view(np.uint8)
    blocks = [rng.integers(0, 256, (*shape, 192), np.uint8), scales, _halves(1.2e-4, shape, rng)]
    return np.concatenate(blocks, -1).reshape(rows, -1)


def _plain(scale: float, value_bytes: int) -> Callable[[int, int, np.random.Generator], NDArray[np.uint8]]:
    """A packer of formats with a scale before the ``value_bytes`` of each 32 values."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        shape = (rows, columns // GROUP)
        values = np.frombuffer(rng.bytes(rows * columns // GROUP * value_bytes), np.uint8).reshape(*shape, value_bytes)
        return np.concatenate([_halves(scale, shape, rng), values], -1).reshape(rows, -1)

    return pack


K_QUANTS: Mapping[str, Callable[[int, int, np.random.Generator], NDArray[np.uint8]]] = {"Q4_K": _q4_k, "Q6_K": _q6_k}
BLOCKS = {**K_QUANTS, "Q4_0": _plain(8e-3, 16), "Q5_0": _plain(4e-3, 20), "Q8_0": _plain(5e-4, 32)}


def _words(values: NDArray[np.integer]) -> NDArray[np.int32]:
    """Values of 4 bits [R, C] → [R, C / 8], the first in the lowest bits."""
    fields = values.astype(np.uint32).reshape(len(values), -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(fields, -1).view(np.int32)


def _groups(rows: int, columns: int, rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    """Values [K, N], zero points and scales [K / GROUP, N], as GPTQ and AWQ store them before packing."""
    groups = columns // GROUP
    zeros = rng.integers(1, 16, (groups, rows))
    scales = rng.uniform(0.004, 0.012, (groups, rows)).astype(np.float16)
    return rng.integers(0, 16, (columns, rows)), zeros, scales


def gptq(rows: int, columns: int, rng: np.random.Generator) -> Tensors:
    """GPTQ of 4 bits: words along the input features, zero points less 1."""
    values, zeros, scales = _groups(rows, columns, rng)
    groups = np.arange(columns, dtype=np.int32) // GROUP
    return {"qweight": _words(values.T).T, "qzeros": _words(zeros - 1), "scales": scales, "g_idx": groups}


def awq(rows: int, columns: int, rng: np.random.Generator) -> Tensors:
    """AWQ of 4 bits: words along the output features, interleaved."""
    values, zeros, scales = _groups(rows, columns, rng)
    packed = [_words(part.reshape(len(part), -1, 8)[..., _AWQ_ORDER].reshape(part.shape)) for part in (values, zeros)]
    return {"qweight": packed[0], "qzeros": packed[1], "scales": scales}


_SETTINGS: Mapping[str, tuple[Callable[[int, int, np.random.Generator], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, {"desc_act": False, "checkpoint_format": "gptq"}),
    "awq": (awq, {"zero_point": True, "version": "gemm"}),
}
CHECKPOINTS = tuple(_SETTINGS)


def quantise_folder(folder: Path, method: str) -> None:
    """Replace the projections of the Llama in the HuggingFace ``folder`` by random ones of ``method``, of `CHECKPOINTS`."""
    from safetensors.numpy import load_file, save_file

    pack, settings = _SETTINGS[method]
    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    state = load_file(file)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        rows, columns = state.pop(name).shape
        parts = pack(rows, columns, rng)
        state |= {f"{name.removesuffix('weight')}{part}": np.ascontiguousarray(tensor) for part, tensor in parts.items()}
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, **settings}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
