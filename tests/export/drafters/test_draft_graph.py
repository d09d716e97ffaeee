"""Bundles with a draft head: its graph follows the formulas; texts under ``exact`` are the model's own, whatever it guesses."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures import LAYERS, tiny_model
from export.stub_calibration import draft_tensors, write_calibration
from numpy.typing import NDArray
from runtime.depth.speculation.eager_head import guess_always
from safetensors.numpy import load_file, save_file
from slow_cases import slow_but
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.draft_step import Pairs, run_draft_head
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.depth.speculation import head as head_drafter
from tide_runtime.errors import CalibrationError
from tiny_tokenizer import write_byte_tokenizer

from tide_export import ExportConfig, export
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.export import quantize_loaded
from tide_export.load import fingerprint, load_model
from tide_export.progress import ExportProgress

HIDDEN, TARGETS = 64, ("cpu", "torch")
PROMPTS = [[5, 9, 2, 7], [11, 3], [8, 8, 1, 30, 4, 6, 2]]
CASES = {
    "no exits": ("llama", [], "auto"),
    "cut without exits": ("llama", [], "1,2"),
    "exits": ("llama", [ExitInfo(1, "linear", "max_probability", 0.05, 0.97)], "auto"),
    "positions before layer 0": ("gpt2", [], "auto"),
    "int4": ("llama", [], "auto"),
}


@pytest.fixture(scope="module", params=slow_but(CASES, "exits"))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    architecture, exits, checkpoints = CASES[request.param]
    folder = tmp_path_factory.mktemp("draft")
    model = tiny_model(architecture)
    model.save_pretrained(folder / "model")
    write_byte_tokenizer(folder / "model")
    weights = "int4" if request.param == "int4" else "source"
    loaded = load_model(str(folder / "model"), "fp32", weights=weights)
    if weights == "int4":
        loaded = quantize_loaded(loaded, weights, "rtn", ExportProgress(quiet=True))
    draft = draft_tensors(HIDDEN, 32, model.config.vocab_size)
    write_calibration(folder / "calib", exits, fingerprint(loaded), LAYERS, HIDDEN, draft)
    config = ExportConfig(
        targets=TARGETS,
        calibration=str(folder / "calib"),
        max_seq_len=64,
        checkpoints=checkpoints,
        weights=weights,
        quantizer="rtn",
    )
    export(str(folder / "model"), folder / "engine", config)
    return folder / "engine"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head guesses whenever it has room, as if it cost nothing, and all guesses are verified."""

    guess_always(monkeypatch, 4)


@pytest.fixture(params=TARGETS)
def engines(bundle: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Engine]]:
    threads, depth = ThreadOptions(1), DepthOptions(draft="head")
    options = EngineOptions(target=request.param, device="cpu", threads=threads, depth=depth, max_batch=4)
    made = {name: Engine.load(bundle, replace(options, policy=name)) for name in ("full", "exact")}
    yield made
    for engine in made.values():
        engine.close()


def refusal(engine: Engine) -> str | None:
    """Why ``exact`` drafts nothing: some processors' kernels for int4 give one row other bits than several."""
    limitation = engine.bits_limitation
    return limitation if limitation is not None and "runs as full" in limitation else None


@pytest.fixture
def drafting(engines: dict[str, Engine]) -> Engine:
    """The engine with policy ``exact``, on a processor where it drafts."""
    if (reason := refusal(engines["exact"])) is not None:
        pytest.skip(reason)
    return engines["exact"]


def test_the_graph_follows_the_formulas(bundle: Path, engines: dict[str, Engine]) -> None:
    tensors = {
        name.removeprefix("draft."): array for name, array in load_file(bundle.parent / "calib" / "exits.safetensors").items()
    }
    model = load_model(str(bundle.parent / "model"), "fp32").model
    states = np.random.default_rng(3).normal(size=(2, 2 * HIDDEN)).astype(np.float32)
    context = engines["exact"].backend.context(2)
    assert context.has_draft_head
    pairs = [Pairs(0, 2, [5], states[:1]), Pairs(1, 5, [9], states[1:])]
    tokens, scores, found = run_draft_head(context, pairs)
    embedded = model.get_input_embeddings().weight[[5, 9]]
    if model.config.model_type == "gpt2":
        embedded = embedded + model.transformer.wpe.weight[[3, 6]]
    expected, logits = head(embedded.detach().numpy(), states, tensors)
    quantised = read_manifest(bundle).weights  # then the embedding is rounded too
    np.testing.assert_allclose(found, expected, atol=0.2 if quantised else 0.05)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(scores, (odds / odds.sum(1, keepdims=True)).max(1), atol=0.1 if quantised else 0.03)
    for token, row in zip(tokens, logits, strict=True):
        assert token in tensors["vocabulary"]
        assert row[tensors["vocabulary"].tolist().index(token)] > row.max() - 0.1
    context.close()


def head(embedded: NDArray[np.floating], states: NDArray[np.floating], tensors: dict[str, NDArray]) -> tuple[NDArray, NDArray]:
    def normed(x: NDArray) -> NDArray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    middle, final = np.split(states, 2, axis=-1)
    x = np.concatenate([embedded, normed(middle), normed(final)], -1) @ tensors["fuse"].T
    gate, up = np.split(normed(x) @ tensors["gate_up"].T, 2, axis=-1)
    after = x + (gate / (1 + np.exp(-gate)) * up) @ tensors["down"].T
    return np.concatenate([after, after], -1), normed(after) @ tensors["rows"].T


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_texts_are_the_models_own(engines: dict[str, Engine], params: dict) -> None:
    asked = GenerationParams(max_new_tokens=24, ignore_eos=True, **params)
    own, drafted = (engine.generate(PROMPTS, asked) for engine in (engines["full"], engines["exact"]))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in own]
    assert all(g.stats.drafted.get("head", 0) > 0 for g in drafted) == (refusal(engines["exact"]) is None)
    alone = [engines["exact"].generate([prompt], asked)[0] for prompt in PROMPTS]
    assert [g.token_ids for g in alone] == [g.token_ids for g in own]


@pytest.mark.usefixtures("always")
def test_guesses_read_the_state_behind_which_they_stand(drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first guess of a cycle is the head's on the final state of the token before the last one."""
    seen: list[tuple[list[int], NDArray]] = []

    def spy(context, pairs):
        seen.extend((list(one.tokens), np.array(one.states)) for one in pairs)
        return run_draft_head(context, pairs)

    monkeypatch.setattr(head_drafter, "run_draft_head", spy)
    (generation,) = drafting.generate([PROMPTS[0]], GenerationParams(max_new_tokens=12, ignore_eos=True))
    text = [*PROMPTS[0], *generation.token_ids]
    context = drafting.backend.context(1)
    step = context.step(0, [len(text)], [len(text)])
    step.input_ids[: len(text)] = text
    step.place([0])
    for graph in context.every_layer:
        step.run(graph)
    finals = step.states[: len(text)].copy()
    cycles = [(tokens, states) for tokens, states in seen if any(np.allclose(states[0], final, atol=1e-4) for final in finals)]
    assert len(cycles) >= 3
    for tokens, states in cycles:
        places = [i for i, final in enumerate(finals[:-1]) if np.allclose(states[0], final, atol=1e-4)]
        assert any(text[place + 1] == tokens[0] for place in places)
    context.close()


@pytest.mark.parametrize("change", ["missing", "shape", "infinite"])
def test_broken_tensors_are_refused(bundle: Path, tmp_path: Path, change: str) -> None:
    calibration = shutil.copytree(bundle.parent / "calib", tmp_path / "calib")
    tensors = load_file(calibration / "exits.safetensors")
    if change == "missing":
        tensors = {name: array for name, array in tensors.items() if name != "draft.rows"}
    elif change == "shape":
        tensors["draft.fuse"] = tensors["draft.fuse"][:, :-1].copy()
    else:
        tensors["draft.down"][0, 0] = np.inf
    save_file(tensors, calibration / "exits.safetensors")
    with pytest.raises(CalibrationError, match="draft"):
        read_exit_calibration(calibration)
