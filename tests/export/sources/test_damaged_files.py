"""Hundreds of damaged GGUF and safetensors files: each is refused with its name, or read as what it says; no traceback."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from export.architectures import tiny_model
from export.sources.gguf.tiny_gguf import tiny
from tide_runtime.errors import TideError

from tide_export.load import load_model
from tide_export.sources.gguf.file import read_file

COUNT = 150  # of GGUF files
LOADED = 25  # of those whose header is read are also loaded, and twice as many safetensors files


def damaged(raw: bytes, header: int, rng: np.random.Generator) -> bytes:
    """``raw`` cut short, with some changed or repeated bytes, most of them in its first ``header`` bytes."""
    place = int(rng.integers(4, header if rng.random() < 0.8 else len(raw)))
    kind, length = rng.integers(4), int(rng.integers(1, 9))
    if kind == 0:
        return raw[:place]
    if kind == 1:
        return raw[:place] + rng.bytes(length) + raw[place + length :]
    if kind == 2:
        return raw[:place] + bytes([255] * length) + raw[place + length :]
    return raw[:place] + raw[place - length : place] + raw[place:]


def refused(load: Callable[[], object]) -> bool:
    """Whether ``load`` ends with an error for users. Others are not caught."""
    try:
        load()
    except TideError as error:
        assert str(error)
        return True
    return False


def test_gguf_files(tmp_path: Path) -> None:
    """Someone with half a download would get a traceback of struct, or a model of whatever follows the damage."""
    raw = tiny("qwen2").write(tmp_path / "whole.gguf").read_bytes()
    header, rng, outcomes, loads = raw.index(b"output_norm.weight"), np.random.default_rng(0), list[bool](), 0
    file = tmp_path / "model.gguf"
    for _ in range(COUNT):
        file.write_bytes(damaged(raw, header, rng))
        outcomes.append(refused(lambda: read_file(file)))
        if not outcomes[-1] and (loads := loads + 1) <= LOADED:
            refused(lambda: load_model(str(file), "fp32", stream=True))
    assert COUNT / 3 < sum(outcomes) < COUNT and loads > LOADED


def test_safetensors_files(tmp_path: Path) -> None:
    """The same for a checkpoint."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    raw = file.read_bytes()
    header, rng = 8 + int.from_bytes(raw[:8], "little"), np.random.default_rng(1)
    outcomes = []
    for _ in range(2 * LOADED):
        file.write_bytes(damaged(raw, header, rng))
        outcomes.append(refused(lambda: load_model(str(tmp_path / "model"), "fp32", tokenizer="none", stream=True)))
    assert LOADED / 2 < sum(outcomes) < 2 * LOADED
