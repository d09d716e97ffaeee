"""A segment's form for several rows computes what its form for one row does, for models that differ in their attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from export.architectures import MAX_POSITIONS, VOCAB, tiny_model
from tide_runtime import Engine
from tide_runtime.backends.onnxruntime import cpu as onnxruntime_cpu
from tide_runtime.bundle.manifest import batched_graph, ragged_graph

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress

# Rotary fused and partial, learned positions, windows, soft-caps, biased and packed projections; 1, 2 and 4 heads a KV head;
# sinks; keys and values expanded from latents.
NAMES = ("llama", "gemma2", "mistral", "gpt2", "phi", "falcon", "gpt_oss", "deepseek_v3")
LENGTHS = (3, 17, 9)  # filled slots of the rows
COUNTS = ([1, 1, 1], [4, 4, 3], [2, 2, 2], [9, 9, 9], [5, 1, 3], [4, 0, 7])  # tokens of each row
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


class Rows:
    """The rows of ``LENGTHS``, prefilled one by one, in slots of their own."""

    def __init__(self, engine: Engine) -> None:
        self.slots, self.segments = engine.backend.context(len(LENGTHS)), [s.name for s in engine.manifest.segments]
        for row, length in enumerate(LENGTHS):
            self.run(row, [ids(length, seed=row)], [0])

    def run(self, first: int, tokens: list[list[int]], lengths: list[int]) -> list[np.ndarray]:
        """Logits [S, V] of ``tokens`` for consecutive rows from ``first``, a list for each."""
        counts = [len(row) for row in tokens]
        step = self.slots.step(first, counts, counts)
        step.input_ids[: sum(counts)] = np.concatenate(tokens)
        step.place(lengths)
        for segment in self.segments:
            step.run(segment)
        return np.split(step.logits[: sum(counts)].astype(np.float32), np.cumsum(counts)[:-1])


@pytest.fixture
def always_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows of one token each would run in the other form, which is faster for them."""
    monkeypatch.setattr(onnxruntime_cpu, "prefers_batched", lambda lengths, *_: len(lengths) > 1)


def check_ragged(engine: Engine, given: list[int]) -> None:
    """Two steps, of ``given`` tokens; rows keep all, one, or all but one, and the next step overwrites the rest."""
    together, alone = Rows(engine), Rows(engine)
    kept = [given[0], min(1, given[1]), max(1, given[2] - 1)]
    lengths = list(LENGTHS)
    for turn in range(2):
        tokens = [ids(count, seed=10 * turn + row) for row, count in enumerate(given)]
        ours = together.run(0, tokens, lengths)
        for row, count in enumerate(kept):
            if not count:
                continue
            expected = alone.run(row, [tokens[row][:count]], [lengths[row]])[0]
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(ours[row][:count], expected, rtol=0, atol=TOLERANCE[engine.manifest.dtype] * scale)
            lengths[row] += count


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_several_rows_equal_one_row_at_a_time(exported, always_plain, name, counts):
    """Rows of a batch, or drafts verified together, would get other logits than alone."""
    check_ragged(exported(name).engine, counts)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_lengths_equal_one_row_at_a_time(exported, name):
    """Every batch that serves more than one person is one; a head sink with any weight would change all of its logits."""
    case = exported(name)
    check_ragged(case.engine, [1, 1, 1])
    named = {ragged_graph(segment.name) for segment in case.manifest.segments}
    wanted = named if name in ("llama", "mistral") else set()  # heads of others share no keys, or have a soft-cap or sinks
    assert named & set(case.manifest.targets["cpu"].graphs) == named & set(case.engine.backend.sessions) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_attention_is_lowered_and_rotary_stays_fused(exported, name):
    """An attention left out would fail at the first batch, a rotary left behind would be slow without failing anything."""
    case = exported(name)
    target = case.manifest.targets["cpu"]
    assert target.passes["attention_batched"] == case.manifest.model.num_layers
    for segment in case.manifest.segments:
        file = case.engine.bundle.path(target.graphs[batched_graph(segment.name)])
        operators = [node.op_type for node in onnx.load(file, load_external_data=False).graph.node]
        layers = segment.layers[1] - segment.layers[0]
        assert "GroupQueryAttention" not in operators
        assert operators.count("TensorScatter") == 2 * layers
        assert operators.count("RotaryEmbedding") == (0 if name in ("gpt2", "phi", "gpt_oss", "deepseek_v3") else 2 * layers)


def test_half_precision(tmp_path, always_plain):
    """fp16 would fail at a kernel that ONNX Runtime lacks, or lose the softmax's small terms."""
    config = ExportConfig(dtype="fp16", checkpoints="2", max_seq_len=MAX_POSITIONS // 2, verify=False)
    loaded = LoadedModel(tiny_model("llama", torch.float16), None, "llama")
    write_bundle(loaded, tmp_path, config, ExportProgress(quiet=True))
    with Engine.load(tmp_path) as engine:
        for counts in ([1, 1, 1], [4, 0, 2]):
            check_ragged(engine, counts)
