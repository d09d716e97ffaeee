"""The batched form of a segment, which target ``cuda`` has, computes the same as target ``cpu`` for one sequence at a time.

Its backend runs over host memory here, its graphs with ONNX Runtime's CPU provider.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export.architectures import FEW_LAYERS, MAX_POSITIONS, VOCAB, tiny_model
from runtime.host_device import HostDevice
from tide_runtime import ThreadOptions
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import batched_graph

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

# Rotary fused and partial, learned positions, windows, soft-caps, biased and packed projections; 1, 2 and 4 heads a KV head;
# sinks; keys and values expanded from latents.
NAMES = ("llama", "gemma2", "mistral", "gpt2", "phi", "falcon", "gpt_oss", "deepseek_v3")
LENGTHS = (3, 17, 9)  # filled slots of the sequences
COUNTS = ([1, 1, 1], [4, 4, 3], [2, 2, 2], [9, 9, 9], [5, 1, 3], [4, 0, 7])  # tokens of each sequence
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


class Sequences:
    """The sequences of ``LENGTHS``, prefilled one by one, each in its own KV slots."""

    def __init__(self, backend: OnnxRuntimeBackend | OnnxRuntimeCudaBackend) -> None:
        self.slots, self.segments = backend.context(len(LENGTHS)), [s.name for s in backend.manifest.segments]
        for number, length in enumerate(LENGTHS):
            self.run(number, [ids(length, seed=number)], [0])

    def run(self, first: int, tokens: list[list[int]], lengths: list[int]) -> list[np.ndarray]:
        """Logits [S, V] of ``tokens`` for each of the consecutive sequences from ``first`` on."""
        counts = [len(sequence) for sequence in tokens]
        step = self.slots.step(first, counts, counts)
        step.input_ids[: sum(counts)] = np.concatenate(tokens)
        step.place(lengths)
        for segment in self.segments:
            step.run(segment)
        return np.split(np.array(step.logits[: sum(counts)]).astype(np.float32), np.cumsum(counts)[:-1])


def write(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> Bundle:
    """The bundle of ``name`` for both targets."""
    half = "fp16" if dtype == torch.float16 else "fp32"
    config = ExportConfig(targets=("cpu", "cuda"), dtype=half, checkpoints="1", max_seq_len=MAX_POSITIONS // 2, verify=False)
    model = tiny_model(name, dtype, layers=FEW_LAYERS)
    write_bundle(LoadedModel(model, None, name), directory, config, ExportProgress(quiet=True))
    return Bundle.open(directory)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """``exported(architecture)``: its bundle."""
    made: dict[str, Bundle] = {}

    def make(name: str) -> Bundle:
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


def check_ragged(bundle: Bundle, given: list[int]) -> None:
    """Two steps of ``given`` tokens. Sequences keep all, one, or all but one token; the next step overwrites the rest."""
    batched = OnnxRuntimeCudaBackend.load(bundle, "cuda", ThreadOptions(1), HostDevice(), ("CPUExecutionProvider", {}))
    batched._fused = False  # in fp16 too, where steps of one token each would run the other form
    together, alone = Sequences(batched), Sequences(OnnxRuntimeBackend.load(bundle, "cpu", ThreadOptions(1)))
    kept = [given[0], min(1, given[1]), max(1, given[2] - 1)]
    lengths = list(LENGTHS)
    for turn in range(2):
        tokens = [ids(count, seed=10 * turn + number) for number, count in enumerate(given)]
        ours = together.run(0, tokens, lengths)
        for number, count in enumerate(kept):
            if not count:
                continue
            expected = alone.run(number, [tokens[number][:count]], [lengths[number]])[0]
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(ours[number][:count], expected, rtol=0, atol=TOLERANCE[bundle.manifest.dtype] * scale)
            lengths[number] += count


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_batched_form_equals_one_sequence_at_a_time(exported, name, counts):
    """Sequences of a batch, or drafts verified together, would get other logits than alone."""
    check_ragged(exported(name), counts)


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_is_lowered_and_rotary_stays_fused(exported, name):
    """An attention that is not lowered would fail at the first batch; an unfused rotary embedding would only be slow."""
    bundle = exported(name)
    target = bundle.manifest.targets["cuda"]
    assert target.passes["attention_batched"] == bundle.manifest.model.num_layers
    for segment in bundle.manifest.segments:
        file = bundle.path(target.graphs[batched_graph(segment.name)])
        operators = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
        layers = segment.layers[1] - segment.layers[0]
        assert "GroupQueryAttention" not in operators
        assert operators.count("TensorScatter") == 2 * layers
        assert operators.count("RotaryEmbedding") == (0 if name in ("gpt2", "phi", "gpt_oss", "deepseek_v3") else 2 * layers)


def test_half_precision(tmp_path):
    """fp16 would fail at a kernel that ONNX Runtime lacks, or lose small terms of the softmax."""
    bundle = write(tmp_path, "llama", torch.float16)
    for counts in ([1, 1, 1], [4, 0, 2]):
        check_ragged(bundle, counts)
