"""Every key that the package gguf knows, set to unusual values in a file of every architecture that is read.

Each is refused, or the model is what llama.cpp computes of the same file.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from export.sources.gguf.llamacpp import LlamaCppProcess
from export.sources.gguf.test_gguf_metadata import IDS, YARN, log_probs
from export.sources.gguf.test_gguf_recurrent import loaded
from export.sources.gguf.tiny_gguf import ARCHITECTURES, CONTEXT, VOCAB, GgufFile, tiny
from export.sources.gguf.tiny_recurrent import MODELS, tiny_recurrent
from slow_cases import slow_but
from tide_runtime.errors import TideError
from transformers import PreTrainedModel

from tide_export.sources.gguf.architectures import ARCHITECTURES as READ
from tide_export.sources.gguf.architectures import read_config
from tide_export.sources.gguf.file import Metadata, read_file
from tide_export.sources.gguf.source import UNREADABLE

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
NUMBERS = (
    "epsilon", "scale", "softcapping", "bias", "clamp_kqv", "factor", "alpha", "multiplier", "freq_base", "_swa", "_linear",
    "beta_fast", "beta_slow",
)  # fmt: skip
_DEEP = 16  # layers: a model that deep is there for its windows, and the architecture's shallow one for the other keys
PLACES = {"rope.scaling.attn_factor": [1.3], "context_length": [300], "rope.scaling.original_context_length": [16, 100]}


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


def variants(content: GgufFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is changed, and all keys of the file with it: of the file as it is, and rotary ones of one with YaRN as well."""
    architecture = content.keys["general.architecture"]
    own = {
        key.removeprefix(f"{architecture}."): value for key, value in content.keys.items() if key.startswith(f"{architecture}.")
    }
    others = {key: value for key, value in content.keys.items() if not key.startswith(f"{architecture}.")}
    yield "nothing", dict(content.keys)
    for base in ({}, YARN):
        present = {**own, **base}
        for key in dict.fromkeys([*KEYS, *OLDER, *own]):
            if base and not key.startswith("rope."):
                continue
            if own["block_count"] > _DEEP and not key.startswith("attention.sliding_window"):
                continue
            for value in unusual(key, present.get(key), own["block_count"]):
                changed = {**present, key: value}
                yield (
                    f"{key} = {value}{' with YaRN' if base else ''}",
                    {
                        **others,
                        **{f"{architecture}.{name}": held for name, held in changed.items() if held is not None},
                    },
                )


def model_of(content: GgufFile, tensors: Any, folder: Path) -> PreTrainedModel | None:
    """The file's model; None where it is refused, most often by its keys, without a file."""
    with suppress(TideError):
        with suppress(*UNREADABLE):  # `load_gguf` says it in its own words
            read_config(Metadata("model.gguf", content.keys), tensors)
        return loaded(content, folder)[0]
    return None


@dataclass
class Sweep:
    """What was compared of all files: the largest difference of a log-probability for each."""

    reference: LlamaCppProcess = field(default_factory=LlamaCppProcess)
    differences: list[float] = field(default_factory=list)
    unread: int = 0


@pytest.fixture(scope="module")
def sweep() -> Iterator[Sweep]:
    pytest.importorskip("xllamacpp", reason="llama.cpp is the reference")
    found = Sweep()
    yield found
    found.reference.close()
    print(f"\nRESULT gguf_architectures={len(READ)}")
    print(f"RESULT gguf_keys_compared={len(found.differences)}")
    print(f"RESULT gguf_keys_unread_by_llamacpp={found.unread}")
    print(f"RESULT gguf_keys_different={sum(not difference < TOLERANCE for difference in found.differences)}")
    print(f"RESULT max_dlogprob={max(found.differences):.6f}")


def test_every_architecture_is_swept() -> None:
    """Keys of one that is left out could mean anything."""
    swept = {name.split()[0] for name in ARCHITECTURES} | {architecture for architecture, *_ in MODELS.values()}
    assert swept == {*READ}


@pytest.mark.parametrize("name", slow_but([*ARCHITECTURES, *MODELS], "llama"))
def test_every_key_is_refused_or_means_what_it_does_in_llama_cpp(name: str, sweep: Sweep, tmp_path: Path) -> None:
    """The key would be dropped, and the bundle be another model than the file's."""
    content = tiny(name) if name in ARCHITECTURES else tiny_recurrent(name)
    _, tensors = read_file(content.write(tmp_path / "model.gguf"))
    different = []
    for change, keys in variants(content):
        content.keys = keys
        if (model := model_of(content, tensors, tmp_path)) is None:
            continue
        expected = sweep.reference.log_probs(tmp_path / "model.gguf", 2 * CONTEXT, IDS, VOCAB)
        if expected is None:
            sweep.unread += 1
            continue
        sweep.differences.append(float(np.abs(log_probs(model) - expected).max()))
        if not sweep.differences[-1] < TOLERANCE:
            different.append(f"{change}: {sweep.differences[-1]:.4f}")
    assert not different
