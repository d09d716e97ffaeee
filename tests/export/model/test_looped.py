"""Looped models: texts, policies and memory of their bundles, the gate as a router, and what is refused."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from export.looped_tiny import FORMS, VOCAB, made, nanbeige, ouro, saved
from export.stub_calibration import write_calibration
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions, gate_threshold
from tide_runtime.errors import CalibrationError, ParamsError, UnsupportedModelError
from tide_runtime.outputs import Generation, RequestStats
from transformers import PreTrainedModel

from tide_export import ExportConfig, export
from tide_export.load import fingerprint, load_model
from tide_export.model.remote_code import check_remote_code
from tide_export.quantize.gptq import visit_inputs
from tide_export.trace import trace_model as tracing

NEW = 20
ASKED = GenerationParams(max_new_tokens=NEW, ignore_eos=True)
OPTIONS = EngineOptions(policy="full", max_batch=8, prefix_cache=False, threads=ThreadOptions(1))


@dataclass(frozen=True)
class Case:
    """``texts``: what transformers generates after each prompt; ``traced``: calls of layers that torch traced."""

    model: PreTrainedModel
    engine: Engine
    prompts: list[list[int]]
    texts: list[tuple[int, ...]]
    layers: int
    loops: int
    traced: int

    @property
    def depth(self) -> int:
        return self.layers * self.loops

    @property
    def manifest(self) -> Manifest:
        return self.engine.manifest

    def run(self, prompts: Sequence[Sequence[int]], **changes: object) -> list[Generation]:
        """The ``prompts`` together under other options."""
        with self.engine.with_options(replace(OPTIONS, **changes)) as engine:  # type: ignore[arg-type]
            return engine.generate(prompts, ASKED)

    def check(self, **changes: object) -> list[RequestStats]:
        """`run` of all prompts: each text is transformers'."""
        found = self.run(self.prompts, **changes)
        assert [one.token_ids for one in found] == self.texts, changes
        return [one.stats for one in found]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    """``cases(form)``: a verified bundle in one segment a loop. Those without a gate have exits of a stub calibration."""
    engines: list[Engine] = []

    @cache
    def make(form: str) -> Case:
        folder, own, (layers, loops) = tmp_path_factory.mktemp(form), form == "own", FORMS[form]
        source = str(saved(form, folder / "model"))
        loaded = load_model(source, "fp32", trust_remote_code=own, tokenizer="none")
        calibration = None
        if form != "ouro":
            exits = [ExitInfo(loop * layers, "identity", "max_probability", 0.0, 0.5) for loop in range(1, loops)]
            calibration = str(write_calibration(folder / "calib", exits, fingerprint(loaded), layers * loops, 32))
            if own:
                _write_code(folder / "calib", loaded.code)
        config = ExportConfig(max_seq_len=64, targets=("cpu",), tokenizer="none", calibration=calibration)
        traced, whole = [], tracing._traced
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tracing, "_traced", lambda model, kept: (traced.append(len(kept)), whole(model, kept))[1])
            export(source, folder / "bundle", config, trust_remote_code=own)
        random = np.random.default_rng(0)
        prompts = [random.integers(3, VOCAB, n).tolist() for n in (1, 2, 9, 17, 5, 24, 3, 12)]
        texts = []
        for ids in prompts:
            text = loaded.model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            texts.append(tuple(text[0, len(ids) :].tolist()))
        assert sum(len(set(text)) > 3 for text in texts) > 4, "a constant output would hide most mistakes"
        engines.append(Engine.load(folder / "bundle", OPTIONS))
        return Case(loaded.model, engines[-1], prompts, texts, layers, loops, sum(traced))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=slow_but(FORMS, "ouro"))
def case(cases: Callable[[str], Case], request: pytest.FixtureRequest) -> Case:
    return cases(request.param)


def _write_code(calibration: Path, code: object) -> None:
    file = calibration / "calibration.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"code": code}))


def test_full_is_transformers_own(case):
    """A loop would read another one's keys, or the norm between two loops would be lost or done twice."""
    for batch in (1, 8):
        case.check(max_batch=batch)


@pytest.mark.parametrize("batch", [1, 8])
def test_exact_is_transformers_own(case, batch):
    """Drafts of early loops would change the text: their keys stay in the caches of loops that they never ran."""
    case.check(policy="exact", max_batch=batch)
    stats = case.check(policy="exact", max_batch=batch, depth=DepthOptions(draft="router"))
    assert batch > 1 or any(one.drafted for one in stats), "no loop drafted"


def test_exit_with_all_thresholds_up(case):
    """A token would stop although no router may let it go, or be lost while it waits for others."""
    for batch in (1, 8):
        stats = case.check(policy="exit", max_batch=batch, depth=DepthOptions(threshold=1.0))
        assert {depth for one in stats for depth in one.token_depths} == {case.depth}


def test_exit_stops_at_the_ends_of_loops(case):
    """Early exits would be computed as if they were not taken, and nothing would be saved."""
    depths = case.run(case.prompts[3:4], policy="exit", max_batch=1, depth=DepthOptions(threshold=0.0))[0].stats.token_depths
    assert set(depths) <= {case.layers, case.depth} and case.layers in depths


def test_preemption_and_prefixes(case):
    """A preempted text, or one with a known prefix, would go on from keys of the first loop alone."""
    stats = case.check(policy="exact", kv_memory=128 * case.engine.backend.kv_bytes_per_token)
    assert any(one.preemptions for one in stats)
    long = case.prompts[5] + list(case.texts[5][:10])
    with case.engine.with_options(replace(OPTIONS, policy="exact", prefix_cache=True)) as engine:
        found = [engine.generate(long, ASKED)[0] for _ in range(2)]
    assert [one.token_ids[: NEW - 10] for one in found] == [case.texts[5][10:]] * 2
    assert found[1].stats.prefix_tokens


def test_the_manifest(case):
    """A reader could not tell loops from layers, or a second set of weights would be stored for each loop."""
    model, manifest = case.manifest.model, case.manifest
    assert (model.loops, model.num_layers, len(manifest.kv)) == (case.loops, case.depth, case.depth)
    assert [graph.layers for graph in manifest.segments] == [[end - case.layers, end] for end in _ends(case, case.loops)]
    assert bool(model.code) == (model.model_type == "spiral")
    weights = manifest.targets["cpu"].weights
    assert manifest.files[weights].bytes < 1.3 * 4 * model.parameters
    assert case.traced == min(3, case.layers) * case.loops


def _ends(case: Case, loops: int) -> list[int]:
    return [loop * case.layers for loop in range(1, loops + 1)]


def test_the_models_own_rule(cases):
    """Tokens would leave at other loops than the gate that they were trained with says."""
    case = cases("ouro")
    assert [(exit.checkpoint, exit.router) for exit in case.manifest.calibration.exits] == [(1, "gate"), (2, "gate")]
    for threshold in (0.3, 0.8):
        depth = DepthOptions(exit_rule="model", threshold=threshold)
        found = case.run(case.prompts, policy="exit", depth=depth)
        loops = [_by_own_rule(case.model, ids, one.token_ids, threshold) for ids, one in zip(case.prompts, found, strict=True)]
        assert [list(one.stats.token_depths) for one in found] == loops  # of one layer
        assert len({loop for one in loops for loop in one}) > 1, "all tokens leave at one loop"
    case.check(policy="exit", depth=DepthOptions(exit_rule="model"))  # the config's threshold is 1
    with pytest.raises(ParamsError, match="min_depth"):
        DepthOptions(exit_rule="model", min_depth=2)
    without_a_gate = replace(case.manifest, model=replace(case.manifest.model, exit_threshold=None))
    with pytest.raises(ParamsError, match="gate"):
        gate_threshold(without_a_gate, DepthOptions(exit_rule="model"))


@torch.no_grad()
def _by_own_rule(model: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], threshold: float) -> list[int]:
    """At which loop each token of ``text`` but the first leaves, by the paper; checks that the token is that loop's."""
    states = model.model(torch.tensor([[*prompt, *text]])).loop_states
    gates = torch.stack([torch.sigmoid(model.model.early_exit_gate(state))[0, :, 0] for state in states[:-1]])
    left = torch.cat([1 - (1 - gates).cumprod(0), torch.ones(1, gates.shape[1])])
    leaves = (left >= threshold).float().argmax(0)
    tokens = torch.stack([model.lm_head(state)[0].argmax(-1) for state in states])
    places = range(len(prompt), len(prompt) + len(text) - 1)
    assert [int(tokens[leaves[place], place]) for place in places] == list(text[1:])
    return [int(leaves[place]) + 1 for place in places]


@pytest.mark.parametrize("make, switch", [(nanbeige, "loop_share_kv"), (nanbeige, "enable_mhc"), (ouro, "use_sliding_window")])
def test_unknown_forms_are_refused(make, switch):
    """Parts of the published code that the classes here leave out would silently be missing."""
    with pytest.raises(UnsupportedModelError, match=switch):
        make(**{switch: True})


def test_gptq_reads_all_loops():
    """A matrix would be rounded for the inputs of the first loop alone."""
    model, inputs, grams = made(nanbeige()), [], {}
    module = model.model.layers[1].mlp.down_proj
    tokens = torch.arange(24).reshape(2, 12)
    with module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, 1))), torch.no_grad():
        model(tokens)
    visit_inputs(model, {"down": module}, tokens, grams.__setitem__, loops=2)
    torch.testing.assert_close(grams["down"], sum(one.T @ one for one in inputs))
    assert len(inputs) == 2


def test_code_that_comes_with_a_model(tmp_path, monkeypatch):
    """Code would run without the flag, or changed since it was read; or the refusal would not name it."""
    source = saved("own", tmp_path / "model")
    with pytest.raises(
        UnsupportedModelError, match=r"configuration_spiral\.py, modeling_spiral\.py in .*model, .*--trust-remote"
    ):
        load_model(str(source), "fp32", tokenizer="none")
    loaded = load_model(str(source), "fp32", trust_remote_code=True, tokenizer="none")
    assert sorted(loaded.code) == ["configuration_spiral.py", "modeling_spiral.py"]
    calibration = write_calibration(tmp_path / "calib", [], fingerprint(loaded), 4, 32)
    _write_code(calibration, dict(loaded.code) | {"modeling_spiral.py": "0" * 64})
    with pytest.raises(CalibrationError, match=r"modeling_spiral\.py changed"):
        config = ExportConfig(calibration=str(calibration), tokenizer="none", targets=("cpu",), max_seq_len=64)
        export(str(source), tmp_path / "bundle", config, trust_remote_code=True)
    config = json.loads((source / "config.json").read_text())
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: (config, {}))
    monkeypatch.setattr("tide_export.model.remote_code.get_tokenizer_config", lambda *_, **__: tokenizer)
    tokenizer: dict[str, object] = {}
    with pytest.raises(ParamsError, match="--revision"):
        check_remote_code("org/spiral", "main", trusted=True)
    check_remote_code("org/spiral", "0" * 40, trusted=True)
    config["auto_map"]["AutoModelForCausalLM"] = "other/code--modeling_spiral.SpiralForCausalLM"
    with pytest.raises(UnsupportedModelError, match="another repository, other/code"):
        check_remote_code(str(source), None, trusted=True)
    config["model_type"] = "ouro"  # loaded by a class of the exporter, whatever comes with it
    check_remote_code("org/ouro", None, trusted=True)
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_spiral.SpiralTokenizer", None]}
    with pytest.raises(ParamsError, match="--revision"):
        check_remote_code("org/ouro", "main", trusted=True)
