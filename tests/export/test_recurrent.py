"""Exports of models with recurrent layers: what a layer keeps, what its graphs compute, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from export.recurrent_models import RECURRENT, VOCAB, tiny_recurrent_model, write_recurrent_bundle
from export.stub_calibration import write_calibration
from numpy.typing import NDArray
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.backends.onnxruntime.invariance import LEAST_PADDING
from tide_runtime.backends.step_arrays import StepPositions, StepShape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import ADVANCE, Manifest
from tide_runtime.errors import CalibrationError, TargetError, UnsupportedModelError
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import LoadedModel, fingerprint
from tide_export.probe import probe_layers
from tide_export.progress import ExportProgress

FAMILIES = ("qwen3_5", "falcon_h1", "nemotron_h", "mamba")  # each kind of layer; benchmarks.hybrids runs every family
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory):
    """``bundles(family)``: folder and manifest of a verified export."""
    made: dict[str, tuple[Path, Manifest]] = {}

    def make(family: str) -> tuple[Path, Manifest]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, write_recurrent_bundle(family, directory)
        return made[family]

    return make


def _kept(family: str) -> list[str]:
    """What each layer keeps, in words."""
    layers = probe_layers(tiny_recurrent_model(family))
    return ["+".join([*(["kv"] if layer.kv else []), *(state.kind[:4] for state in layer.states)]) for layer in layers]


@pytest.mark.parametrize("family", RECURRENT)
def test_every_family_is_understood(family: str):
    """A model would be refused, or a layer lose its state."""
    kept, mixed = _kept(family), "conv+recu"
    wanted = {"lfm2": ["conv", "kv"], "lfm2_moe": ["conv", "kv"], "nemotron_h": [mixed, "", "kv"]}
    wanted |= {name: [mixed, mixed] for name in ("mamba", "mamba2", "falcon_mamba")} | {"falcon_h1": [f"kv+{mixed}"]}
    assert kept == wanted.get(family, [mixed, "kv"])


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_equal_the_eager_model(bundles, family: str):
    """The bundle would compute other logits than the model, over a prompt or token by token: the export itself compares both."""
    directory, manifest = bundles(family)
    graph = onnx.load(directory / manifest.targets["cpu"].graphs["segment_0"], load_external_data=False).graph
    assert not any(node.domain == "tide" for node in graph.node)
    kinds = Counter(state.kind for state in manifest.states.values())
    operators = Counter(node.op_type for node in graph.node)
    assert operators["Conv"] == kinds["convolution"] and operators["LinearAttention"] == kinds["recurrence"]
    assert len(manifest.segments) == 1, "cuts would only cost launches"


def _accepted(counts: list[int], starts: list[int]) -> Arrays:
    """Index inputs of the advance graph for ``counts[b]`` rows of each sequence from ``starts[b]`` on, among the packed ones."""
    offsets = np.arange(max(counts))
    rows = np.array(starts)[:, None] + np.minimum(offsets, np.array(counts)[:, None] - 1)
    mask = np.less(offsets, np.array(counts)[:, None]).astype(np.float32)
    return {"padded_rows": np.stack([np.zeros_like(rows), rows], -1), "row_mask": mask}


class _Graphs:
    """A bundle's step and advance graphs, and the caches and states of two sequences."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        files = manifest.targets["cpu"].graphs
        self.whole, self.advance = (ort.InferenceSession(str(directory / files[name])) for name in ("segment_0", ADVANCE))
        self.kept: Arrays = {}
        for value in self.whole.get_inputs():
            if "_cache_" in value.name or value.name.startswith("state_"):
                sizes = [size if isinstance(size, int) else 32 for size in value.shape[1:]]
                self.kept[value.name] = np.zeros((2, *sizes), np.float32)

    def run(self, ids: list[list[int]], cached: list[int]) -> Arrays:
        """One step of each sequence's ``ids``; all outputs, and the caches and states afterwards are kept."""
        counts = [len(tokens) for tokens in ids]
        shape = StepShape.of(0, counts, counts, LEAST_PADDING)
        positions = StepPositions(shape, LEAST_PADDING.sequence)
        positions.arrange(counts, counts)
        positions.place(cached)
        packed = np.zeros((1, shape.tokens), np.int64)
        packed[0, : sum(counts)] = np.concatenate(ids)
        feeds = {**positions.arrays, "input_ids": packed, "position_ids": positions.arrays["position_ids"][None]}
        names = {value.name for value in self.whole.get_inputs()}
        outputs = _run(self.whole, {name: array for name, array in (feeds | self.kept).items() if name in names})
        self.kept = {name: outputs[written_name(name)] for name in self.kept}
        return outputs


def _run(session: ort.InferenceSession, feeds: Arrays) -> Arrays:
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_transformers_own(bundles, family: str):
    """A state would be right for a prompt, and wrong from some token on."""
    ids = np.random.default_rng(2).integers(3, VOCAB, 11).tolist()
    with Engine.load(bundles(family)[0], EngineOptions(threads=ThreadOptions(1))) as engine:
        found = engine.generate(ids, GenerationParams(max_new_tokens=24, ignore_eos=True))[0].token_ids
    model = tiny_recurrent_model(family)
    model.generation_config.eos_token_id = None
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert list(found) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_same_whatever_shares_a_step(bundles, family: str):
    """A reply would change with the other requests of a batch or with the chunks of its prompt, bit by bit."""
    texts = np.random.default_rng(0).integers(3, VOCAB, (2, 9)).tolist()
    whole, chunked = _Graphs(*bundles(family)), _Graphs(*bundles(family))
    whole.run(texts, [0, 0])
    done = [0, 0]
    for counts in ([1, 4], [5, 0], [0, 1], [2, 3], [1, 1]):
        chunked.run([text[at : at + n] for text, at, n in zip(texts, done, counts, strict=True)], done)
        done = [at + n for at, n in zip(done, counts, strict=True)]
    assert done == [9, 9]
    for name, state in whole.kept.items():
        if name.startswith("state_"):
            np.testing.assert_array_equal(chunked.kept[name], state, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_no_trace_in_states(bundles, family: str):
    """After a rejected draft every later token would come from a state that has read it."""
    texts = np.random.default_rng(1).integers(3, VOCAB, (2, 8)).tolist()
    drafted, plain = _Graphs(*bundles(family)), _Graphs(*bundles(family))
    for graphs in (drafted, plain):
        graphs.run([text[:3] for text in texts], [0, 0])
    before = {name: value for name, value in drafted.kept.items() if name.startswith("state_")}
    outputs = drafted.run([texts[0][3:8], texts[1][3:6]], [3, 3])
    accepted = _accepted([2, 1], starts=[0, 5])  # among the step's eight rows
    names = {value.name for value in drafted.advance.get_inputs()}
    advanced = _run(drafted.advance, {name: array for name, array in (accepted | outputs | before).items() if name in names})
    plain.run([texts[0][3:5], texts[1][3:4]], [3, 3])
    for name in before:
        np.testing.assert_array_equal(advanced[written_name(name)], plain.kept[name], err_msg=name)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_weights(tmp_path: Path, weights: str):
    """Projections of recurrent layers would stay in fp32, or be other ones than the model's."""
    manifest = write_recurrent_bundle("qwen3_5", tmp_path, weights)
    passes = manifest.targets["cpu"].passes
    assert passes["quantize_weights"] == 17 and passes["pack_products"] == 4


def test_exits_are_refused(tmp_path: Path):
    """Tokens would stop between layers whose state then lacks them."""
    model = tiny_recurrent_model("lfm2")
    loaded = LoadedModel(model, None, "lfm2")
    stop = ExitInfo(1, "identity", "max_probability", 0.5)
    write_calibration(tmp_path / "calibration", [stop], fingerprint(loaded), 2, 64)
    config = ExportConfig(calibration=str(tmp_path / "calibration"), targets=("cpu",))
    with pytest.raises(CalibrationError, match="recurrent layers, and early exits do not pay"):
        write_bundle(loaded, tmp_path, config, ExportProgress(quiet=True), read_exit_calibration(tmp_path / "calibration"))


def test_targets_without_states_are_refused(tmp_path: Path):
    """An engine would be built whose runtime has no place for states."""
    loaded = LoadedModel(tiny_recurrent_model("lfm2"), None, "lfm2")
    with pytest.raises(TargetError, match=r"target cuda does not run the model's recurrent layers.*compile for: cpu"):
        write_bundle(loaded, tmp_path, ExportConfig(targets=("cuda",)), ExportProgress(quiet=True))


def test_recurrences_of_unknown_functions_are_refused(monkeypatch: pytest.MonkeyPatch):
    """A layer would be traced without its state: right for one step, wrong for the next."""
    model = tiny_recurrent_model("lfm2")
    monkeypatch.setattr(Lfm2ShortConv, "forward", lambda self, hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match=r"some layers \(conv\) never used their cache"):
        probe_layers(model)
