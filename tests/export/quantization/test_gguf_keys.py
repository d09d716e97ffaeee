"""Every key that the package gguf knows, set to unusual values in a file of every architecture that is read.

Each is refused, or the model is what llama.cpp computes of the same file.
"""

import inspect
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from export.quantization.llamacpp import LlamaCpp
from export.quantization.test_gguf_metadata import IDS, YARN, log_probs
from export.quantization.test_gguf_recurrent import loaded
from export.quantization.tiny_gguf import ARCHITECTURES, CONTEXT, VOCAB, GgufFile, tiny
from export.quantization.tiny_recurrent import MODELS, tiny_recurrent
from numpy.typing import NDArray
from tide_runtime.errors import TideError

from tide_export.quantization import gguf_architectures
from tide_export.quantization.gguf_architectures import read_config
from tide_export.quantization.gguf_file import read_file
from tide_export.quantization.gguf_metadata import Metadata

TOLERANCE = 1e-3
KEYS = [
    key.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if inspect.isclass(group)
    for key in vars(group).values()
    if isinstance(key, str) and key.startswith("{arch}.")
]
OLDER = ["rope.scale_linear", "attention.recurrent_layers", "num_loops"]  # keys of llama.cpp that gguf has no constant for
TEXTS = {"rope.scaling.type": ["none", "linear", "yarn", "longrope"], "tensor_data_layout": ["x"], "pooling_type": []}
LISTS = {"classifier.output_labels": ["a"], "rope.dimension_sections": [2, 1, 1, 0]}
FLAGS = ("expert_weights_norm", "use_parallel_residual", "causal", "swin_norm", "finetuned", "dt_b_c_rms")
NUMBERS = ("epsilon", "scale", "softcapping", "bias", "clamp_kqv", "factor", "alpha", "multiplier", "freq_base", "_swa", "_linear", "beta_fast", "beta_slow")  # fmt: skip
PLACES = {"context_length": [300], "rope.scaling.original_context_length": [16, 100]}


def unusual(key: str, present: Any, layers: int) -> Sequence[Any]:
    """Values for ``key`` in the type that llama.cpp reads; None: the file is without it."""
    known = {**TEXTS, **PLACES, **{name: [value] for name, value in LISTS.items()}}
    if key in known:
        return known[key]
    absent = [] if present is None else [None]
    if isinstance(present, bool) or (present is None and key.endswith(FLAGS)):
        return [True, False, *absent]
    if isinstance(present, list):
        return [present[::-1], [1] * len(present), None]
    if isinstance(present, float):
        return [3 * present, *absent]
    if present is None and (key.endswith(NUMBERS) or key.startswith("swiglu")) and "length" not in key and "count" not in key:
        return [0.37, 2.5]
    if key.endswith("pattern"):
        return [2, 3, [layer % 3 != 1 for layer in range(layers)], *absent]
    return [1, 16, 2 * present, present + 1, None] if present is not None else [0, 1, 3, 16]


class Reference:
    """llama.cpp in a process of its own: for some files it aborts."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def log_probs(self, file: Path) -> NDArray[np.float64] | None:
        """None for a file that it does not read."""
        self._pool = self._pool or ProcessPoolExecutor(1, get_context("spawn"))
        try:
            return self._pool.submit(llamacpp_log_probs, file).result()
        except BrokenProcessPool:
            self._pool = None
            return None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def llamacpp_log_probs(file: Path) -> NDArray[np.float64] | None:
    try:
        return LlamaCpp(file, 2 * CONTEXT).log_probs(IDS, VOCAB)
    except (RuntimeError, OSError):
        return None


def variants(content: GgufFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is changed, and all keys of the file with it: of the file as it is, and rotary ones of one with YaRN as well."""
    architecture = content.keys["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in content.keys.items() if key.startswith(f"{architecture}.")}
    others = {key: value for key, value in content.keys.items() if not key.startswith(f"{architecture}.")}
    for base in ({}, YARN):
        present = {**own, **base}
        for key in dict.fromkeys([*KEYS, *OLDER, *own]):
            if base and not key.startswith("rope."):
                continue
            for value in unusual(key, present.get(key), own["block_count"]):
                changed = {**present, key: value}
                yield f"{key} = {value}{' with YaRN' if base else ''}", {
                    **others,
                    **{f"{architecture}.{name}": held for name, held in changed.items() if held is not None},
                }


def refused_by_keys(keys: dict[str, Any], tensors: Any) -> bool:
    """Without a file and a model: most of them."""
    try:
        read_config(Metadata("model.gguf", keys), tensors)
    except (TideError, ValueError, TypeError):  # `load_gguf` names transformers' own in a TideError
        return True
    return False


@pytest.mark.slow
def test_every_key_is_refused_or_means_what_it_does_in_llama_cpp(tmp_path: Path) -> None:
    """The key would be dropped, and the bundle be another model than the file's."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is the reference")
    assert {name.split()[0] for name in ARCHITECTURES} | {MODELS[name][0] for name in MODELS} == {*gguf_architectures.ARCHITECTURES}
    reference, different, compared, unread = Reference(), list[str](), list[float](), 0
    for name in [*ARCHITECTURES, *MODELS]:
        content = tiny(name) if name in ARCHITECTURES else tiny_recurrent(name)
        usual = log_probs(loaded(content, tmp_path)[0])
        expected = reference.log_probs(tmp_path / "model.gguf")
        assert expected is not None, name
        compared.append(float(np.abs(usual - expected).max()))
        _, tensors = read_file(tmp_path / "model.gguf")
        for change, keys in variants(content):
            if refused_by_keys(keys, tensors):
                continue
            content.keys = keys
            try:
                found = log_probs(loaded(content, tmp_path)[0])
            except TideError:
                continue
            expected = reference.log_probs(tmp_path / "model.gguf")
            if expected is None:
                unread += 1
                continue
            compared.append(float(np.abs(found - expected).max()))
            if not compared[-1] < TOLERANCE:
                different.append(f"{name}: {change}: {compared[-1]:.4f}")
    reference.close()
    print(f"RESULT gguf_architectures={len(gguf_architectures.ARCHITECTURES)}")
    print(f"RESULT gguf_keys_compared={len(compared)}")
    print(f"RESULT gguf_keys_unread_by_llamacpp={unread}")
    print(f"RESULT gguf_keys_different={len(different)}")
    print(f"RESULT max_dlogprob={np.nanmax(compared):.6f}")
    assert not different and np.nanmax(compared) < TOLERANCE
