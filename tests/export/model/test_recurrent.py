"""Exports of models with recurrent layers: what a layer keeps, what its graphs compute, and what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from benchmarks.models.families import FAMILIES, SLOTS, VOCAB, family_model
from export.recurrent_models import write_recurrent_bundle
from export.stub_calibration import write_calibration
from numpy.typing import NDArray
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.backends.onnxruntime.invariance import MIN_PADDING
from tide_runtime.backends.step_arrays import StepPositions, StepShape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import ADVANCE, Manifest
from tide_runtime.errors import CalibrationError, TargetError, UnsupportedModelError, VerificationError
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import fingerprint, load_model
from tide_export.model.probe import probe_layers
from tide_export.progress import ExportProgress
from tide_export.quantize.layerwise import last_logits_step_by_step
from tide_export.sources.loaded_model import LoadedModel

EACH_KIND = ("qwen3_5", "falcon_h1", "nemotron_h", "mamba")  # of layers
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
    layers = probe_layers(family_model(family))
    return ["+".join([*(["kv"] if layer.kv else []), *(state.kind[:4] for state in layer.states)]) for layer in layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_understood(family: str):
    """A model would be refused, or a layer lose its state."""
    kept, mixed = _kept(family), "conv+recu"
    wanted = {name: ["conv", "kv", "conv"] for name in ("lfm2", "lfm2_moe")}
    wanted |= {name: [mixed, "", "kv", mixed] for name in ("nemotron_h", "nemotron_h_moe")}
    wanted |= {name: [mixed, mixed] for name in ("mamba", "mamba2", "falcon_mamba")} | {"falcon_h1": [f"kv+{mixed}"] * 2}
    wanted |= {"zamba2": [mixed, f"kv+{mixed}", f"kv+{mixed}"]}
    assert kept == wanted.get(family, [mixed, "kv", mixed])


@pytest.mark.parametrize("family", slow_but(EACH_KIND, "qwen3_5", "nemotron_h"))
def test_graphs_equal_the_eager_model(bundles, family: str):
    """The bundle would compute other logits than the model, over a prompt or token by token: the export itself compares both."""
    directory, manifest = bundles(family)
    graph = onnx.load(directory / manifest.targets["cpu"].graphs["segment_0"], load_external_data=False).graph
    assert not any(node.domain == "tide" for node in graph.node)
    kinds = Counter(state.kind for state in manifest.states.values())
    operators = Counter(node.op_type for node in graph.node)
    assert operators["Conv"] == kinds["convolution"] and operators["LinearAttention"] == kinds["recurrence"]
    assert len(manifest.segments) == 1, "cuts would only cost launches"


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
        shape = StepShape.of(0, counts, counts, MIN_PADDING)
        positions = StepPositions(shape, MIN_PADDING.sequence)
        positions.arrange(counts, counts)
        positions.place(cached)
        packed = np.zeros((1, shape.tokens), np.int64)
        packed[0, : sum(counts)] = np.concatenate(ids)
        feeds = {**positions.arrays, "input_ids": packed, "position_ids": positions.arrays["position_ids"][None]}
        names = {value.name for value in self.whole.get_inputs()}
        outputs = _run(self.whole, {name: array for name, array in (feeds | self.kept).items() if name in names})
        self.kept = {name: outputs[written_name(name)] for name in self.kept}
        return outputs

    @property
    def states(self) -> Arrays:
        return {name: value for name, value in self.kept.items() if name.startswith("state_")}


def _run(session: ort.InferenceSession, feeds: Arrays) -> Arrays:
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("family", slow_but(EACH_KIND, "qwen3_5", "nemotron_h"))
def test_greedy_text_is_transformers_own(bundles, family: str):
    """A state would be right for a prompt, and wrong from some token on."""
    ids = np.random.default_rng(2).integers(3, VOCAB, 11).tolist()
    with Engine.load(bundles(family)[0], EngineOptions(threads=ThreadOptions(1))) as engine:
        found = engine.generate(ids, GenerationParams(max_new_tokens=24, ignore_eos=True))[0].token_ids
    model = family_model(family)
    model.generation_config.eos_token_id = None
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    assert list(found) == wanted


@pytest.mark.parametrize("family", slow_but(EACH_KIND, "qwen3_5", "nemotron_h"))
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
    for name, state in whole.states.items():
        np.testing.assert_array_equal(chunked.kept[name], state, err_msg=name)


@pytest.mark.parametrize("family", slow_but(EACH_KIND, "qwen3_5", "nemotron_h"))
@pytest.mark.parametrize("count", [0, 1])
def test_a_sequence_of_nan_leaves_the_others_alone(bundles, family: str, count: int):
    """One request whose numbers overflow would end those that share its steps: the one that waits, or that takes fewer tokens."""
    texts = np.random.default_rng(3).integers(3, VOCAB, (2, 9)).tolist()
    spoilt, sound = _Graphs(*bundles(family)), _Graphs(*bundles(family))
    spoilt.kept = {name: value.copy() for name, value in spoilt.kept.items()}
    for value in spoilt.kept.values():
        value[0] = np.nan
    for counts, cached in (([3, count], [0, 0]), ([2, 1], [3, count])):
        ids = [text[at : at + n] for text, at, n in zip(texts, cached, counts, strict=True)]
        outputs = [graphs.run(ids, cached) for graphs in (spoilt, sound)]
    assert any(np.isnan(state[0]).any() for state in spoilt.states.values())
    for name, value in sound.kept.items():
        np.testing.assert_array_equal(spoilt.kept[name][1], value[1], err_msg=name)
    np.testing.assert_array_equal(outputs[0]["logits"][0, -1], outputs[1]["logits"][0, -1])


@pytest.mark.parametrize("family", slow_but(EACH_KIND, "qwen3_5", "nemotron_h"))
def test_rejected_drafts_leave_no_trace_in_states(bundles, family: str):
    """After a rejected draft every later token would come from a state that has read it."""
    texts = np.random.default_rng(1).integers(3, VOCAB, (2, 8)).tolist()
    drafted, plain = _Graphs(*bundles(family)), _Graphs(*bundles(family))
    for graphs in (drafted, plain):
        graphs.run([text[:3] for text in texts], [0, 0])
    before = drafted.states
    outputs = drafted.run([texts[0][3:8], texts[1][3:6]], [3, 3])
    plain.run([texts[0][3:5], texts[1][3:4]], [3, 3])
    for row, accepted in enumerate((slice(0, 2), slice(5, 6))):  # among the step's eight tokens
        operands = {name: array[:, accepted] for name, array in outputs.items() if name.startswith("undo_")}
        advanced = _run(drafted.advance, operands | {name: state[row : row + 1] for name, state in before.items()})
        for name in before:
            np.testing.assert_array_equal(advanced[written_name(name)][0], plain.kept[name][row], err_msg=name)


@pytest.mark.parametrize("family", slow_but(["nemotron_h", "zamba2"], "nemotron_h"))
def test_time_steps_are_those_of_decoding(family: str, tmp_path: Path) -> None:
    """Each token would come from steps that only transformers' scan clamps, and no other implementation of the model."""
    model = family_model(family)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.fill_(-8.0)
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), "fp32", tokenizer="none", stream=True)
    (tmp_path / "bundle").mkdir()
    config = ExportConfig(max_seq_len=SLOTS, targets=("cpu",))
    _, checks = write_bundle(loaded, tmp_path / "bundle", config, ExportProgress(quiet=True))
    assert [check.passed for check in checks if "transformers' own cache" in str(check)] == [True]
    ids = np.random.default_rng(3).integers(3, VOCAB, 16).tolist()
    with Engine.load(tmp_path / "bundle", EngineOptions(threads=ThreadOptions(1), policy="full")) as engine:
        found = engine.score(ids, 1).logprobs
    steps = torch.from_numpy(last_logits_step_by_step(model, ids, 15)).log_softmax(-1)[:-1]
    wanted = [row[token].item() for row, token in zip(steps, ids[2:], strict=True)]
    np.testing.assert_allclose(found[1:], wanted, atol=1e-3)


def test_a_scan_that_differs_from_decoding_is_refused(tmp_path: Path) -> None:
    """A config with limits, which transformers' function for one token does not apply, would give other texts than it."""
    model = family_model("mamba2")
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.5, 1.0)
    config = ExportConfig(max_seq_len=SLOTS, targets=("cpu",))
    with pytest.raises(VerificationError, match="transformers' own cache, token by token: relative difference"):
        write_bundle(LoadedModel(model, None, "mamba2"), tmp_path, config, ExportProgress(quiet=True))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_weights(tmp_path: Path, weights: str):
    """Projections of recurrent layers would stay in fp32, or be other ones than the model's."""
    manifest = write_recurrent_bundle("qwen3_5", tmp_path, weights)
    passes = manifest.targets["cpu"].passes
    assert passes["quantize_weights"] == 25 and passes["pack_products"] == 6


def test_exits_are_refused(tmp_path: Path):
    """Tokens would stop between layers whose state then lacks them."""
    model = family_model("lfm2")
    loaded = LoadedModel(model, None, "lfm2")
    stop = ExitInfo(1, "identity", "max_probability", 0.5)
    write_calibration(tmp_path / "calibration", [stop], fingerprint(loaded), 2, 64)
    config = ExportConfig(calibration=str(tmp_path / "calibration"), targets=("cpu",))
    with pytest.raises(CalibrationError, match="recurrent layers, and early exits do not pay"):
        write_bundle(loaded, tmp_path, config, ExportProgress(quiet=True), read_exit_calibration(tmp_path / "calibration"))


def test_targets_without_states_are_refused(tmp_path: Path):
    """An engine would be built whose runtime has no place for states."""
    loaded = LoadedModel(family_model("lfm2"), None, "lfm2")
    with pytest.raises(TargetError, match=r"target cuda does not run the model's recurrent layers.*compile for: cpu"):
        write_bundle(loaded, tmp_path, ExportConfig(targets=("cuda",), dtype="fp16"), ExportProgress(quiet=True))


def test_recurrences_of_unknown_functions_are_refused(monkeypatch: pytest.MonkeyPatch):
    """A layer would be traced without its state: right for one step, wrong for the next."""
    model = family_model("lfm2")
    monkeypatch.setattr(Lfm2ShortConv, "forward", lambda self, hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match=r"some layers \(conv\) never used their cache"):
        probe_layers(model)
