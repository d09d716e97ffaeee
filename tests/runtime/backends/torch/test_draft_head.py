"""Draft heads on target torch, as a GPU runs them: captured graphs, on a simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from export.tiny_drafters import TinyDrafter, measured
from runtime.backends.torch.test_backend import PROMPTS, SimulatedStream
from runtime.depth.speculation.eager_head import guess_always
from runtime.simulated_gpu import SimulatedGpu
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.device.control_flow import Launch, Run
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.step_arrays import NO_PADDING
from tide_runtime.backends.torch.backend import TorchBackend
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import DRAFT, UNCUT

from tide_export import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import load_model
from tide_export.progress import ExportProgress

LIVELY = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting_bundle(hf_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, loaded = tmp_path_factory.mktemp("draft_head"), load_model(str(hf_model_directory), "fp32")
    config = ExportConfig(max_seq_len=64, checkpoints="2", verify=False, targets=("cpu", "torch"))
    write_bundle(loaded, folder, config, ExportProgress(quiet=True), drafter=measured(TinyDrafter(loaded.model, (1, 2, 3))))
    return folder


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}], ids=["greedy", "sampled"])
def test_guesses_are_graphs(drafting_bundle: Path, params: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against guesses that a GPU's host queues kernel by kernel, and graphs that hold the pairs or the caches of the step
    that was captured: the text then stays the model's, and no guess is right. The head of target cpu guesses the same."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    guess_always(monkeypatch, 3)
    captured, capture = list[tuple[str, ...]](), StepGraphs.capture

    def spy(self: StepGraphs, program: Sequence[Run]) -> Launch | None:
        captured.append(tuple(one.name for one in program))
        return capture(self, program)

    monkeypatch.setattr(StepGraphs, "capture", spy)
    bundle, asked = Bundle.open(drafting_bundle), GenerationParams(**LIVELY, **params)
    backend = TorchBackend(bundle, "torch", SimulatedStream(SimulatedGpu()))
    backend.min_slots, backend.machine_key = 16, ["the simulated GPU"]
    options = EngineOptions(policy="exact", threads=ThreadOptions(1), depth=DepthOptions(draft="head"), max_batch=4)
    found = {}
    for target, loaded in (("cpu", None), ("torch", backend)):
        with Engine(bundle, replace(options, target=target), backend=loaded) as engine:
            texts = engine.generate(PROMPTS, asked) + [engine.generate([prompt], asked)[0] for prompt in PROMPTS]
            found[target] = [(text.token_ids, text.stats.drafted, text.stats.accepted) for text in texts]
    assert found["torch"] == found["cpu"] and all(drafted["head"] for _, drafted, _ in found["torch"])
    assert {(DRAFT,), (UNCUT,)} <= {*captured} and backend.step_graphs.refused is None


@pytest.fixture(scope="module")
def rounded_bundle(request: pytest.FixtureRequest, hf_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with weights in 4 bits; where its caches have the model's type it has a draft head, whose cache has that type."""
    folder, loaded = tmp_path_factory.mktemp("rounded"), load_model(str(hf_model_directory), "fp32")
    loaded = quantize_loaded(loaded, "int4", "rtn", ExportProgress(quiet=True))
    config = ExportConfig(max_seq_len=64, checkpoints="2", verify=False, targets=("torch",), weights="int4", kv=request.param)
    drafter = measured(TinyDrafter(loaded.model, (1, 2, 3))) if request.param == "model" else None
    write_bundle(loaded, folder, config, ExportProgress(quiet=True), drafter=drafter)
    return folder


@pytest.mark.parametrize(
    ("rounded_bundle", "params"),
    [("model", {"temperature": 0.8, "top_k": 20, "seed": 3}), ("int8", {})],
    indirect=["rounded_bundle"],
)
def test_texts_in_low_bits_are_those_of_full(
    rounded_bundle: Path, params: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: on a GPU an int4 model writes another text under `exact` than under `full`, or drafts nothing there."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    guess_always(monkeypatch, 3)
    bundle, asked = Bundle.open(rounded_bundle), GenerationParams(**LIVELY, **params)
    drafters, texts = ["ngram", *(["head"] if bundle.manifest.draft_head is not None else [])], dict[str, list[tuple[int, ...]]]()
    for draft in ("none", *drafters):
        backend = TorchBackend(bundle, "torch", SimulatedStream(SimulatedGpu()))
        backend.min_slots, backend.machine_key, backend.row_padding = 16, ["the simulated GPU"], NO_PADDING
        policy, depth = ("full", DepthOptions()) if draft == "none" else ("exact", DepthOptions(draft=draft))
        options = EngineOptions(policy=policy, target="torch", threads=ThreadOptions(1), depth=depth, max_batch=4)
        with Engine(bundle, options, backend=backend) as engine:
            made = engine.generate(PROMPTS, asked) + [engine.generate([prompt], asked)[0] for prompt in PROMPTS]
        texts[draft] = [text.token_ids for text in made]
        assert draft == "none" or any(text.stats.drafted.get(draft) for text in made)
    assert all(found == texts["none"] for found in texts.values())
