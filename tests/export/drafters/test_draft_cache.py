"""Bundles whose draft head attends to the text: its cache holds what the modules compute over the whole text, whatever became of
the sequence, and texts are the model's own."""

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from benchmarks.models.families import family_model
from export.architectures import LAYERS, tiny_model
from export.looped_tiny import made, nanbeige
from export.stub_calibration import write_calibration
from export.tiny_drafters import TinyDrafter, guesses_after, measured
from runtime.depth.speculation.eager_head import guess_always
from slow_cases import slow_but
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.draft_step import DraftGuesses, Pairs, run_draft_head
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import DRAFT, STATES, UNCUT, read_manifest
from tide_runtime.depth.speculation import head as head_drafter
from tide_runtime.depth.speculation.head import HeadDrafter
from tide_runtime.depth.speculation.record import SpeculativeSequence
from tide_runtime.errors import ParamsError, VerificationError
from transformers import PreTrainedModel

from tide_export import ExportConfig
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.drafters.draft_graph import trace_drafter
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import fingerprint
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)
SLOTS, GUESSES = 64, 3  # the longest texts reach the end of the cache
CONFIG = ExportConfig(max_seq_len=SLOTS)
TARGETS = "cpu", "torch"
ALONE = EngineOptions(device="cpu", threads=ThreadOptions(1))
PROMPTS = [[5, 9, 2, 7], [11, 3], [8, 8, 1, 30, 4, 6, 2], [*range(20, 60)], [1], [7, 7, 7], [90, 12, 33], [*range(64, 99)]]
ASKED = GenerationParams(max_new_tokens=24, ignore_eos=True)
SURE = 1.0  # logits by which a guess exceeds the second, which rounding does not change


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return tiny_model("llama")


@pytest.fixture(scope="module")
def drafter(model: PreTrainedModel) -> TinyDrafter:
    return TinyDrafter(model, (1, 2, 3))


@pytest.fixture(scope="module")
def bundle(model: PreTrainedModel, drafter: TinyDrafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft_cache")
    config = replace(CONFIG, targets=TARGETS)
    write_bundle(LoadedModel(model, None, "tiny"), folder, config, QUIET, drafter=measured(drafter))
    return folder


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head guesses whenever it has room, as if it cost nothing, and all guesses are verified."""

    guess_always(monkeypatch, GUESSES)


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Text and guesses of each proposal."""
    seen: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafter.draft

    def spy(self: HeadDrafter, context: object, states: list[SpeculativeSequence]) -> list:
        made = draft(self, context, states)
        for state in states:
            if len(state.head_guess.tokens) == GUESSES:
                seen.append((state.tokens[: state.sequence.num_tokens].tolist(), [*state.head_guess.tokens]))
        return made

    monkeypatch.setattr(HeadDrafter, "draft", spy)
    return seen


def load(bundle: Path, policy: str = "exact", **options) -> Engine:
    depth = DepthOptions(draft="head")
    return Engine.load(bundle, replace(ALONE, policy=policy, depth=depth, verify=False, **options))


def compare(seen: list[tuple[list[int], list[int]]], drafter: TinyDrafter, model: PreTrainedModel, least: int) -> None:
    """The guesses are the modules' over the whole text, where those are sure."""
    compared = 0
    for text, found in seen:
        expected, margins = guesses_after(drafter, model, text, len(found))
        for guess, wanted, margin in zip(found, expected, margins, strict=True):
            if margin < SURE:
                break
            assert guess == wanted, (len(text), found, expected)
            compared += 1
    assert compared >= least


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_texts_are_the_models_own(bundle: Path, params: dict, target: str) -> None:
    """In a batch of 8, with prompts in chunks beside decodes and short of memory, and alone."""
    asked = GenerationParams(max_new_tokens=24, ignore_eos=True, **params)
    with load(bundle, "full", max_batch=8) as engine:
        own = [g.token_ids for g in engine.generate(PROMPTS, asked)]
        block = engine.backend.kv_bytes_per_token * 16
    with load(bundle, target=target, max_batch=8, prefill_chunk=16, kv_memory=12 * block) as engine:
        drafted = engine.generate(PROMPTS, asked)
        assert engine.stats().preemptions > 0
        alone = [engine.generate([prompt], asked)[0] for prompt in PROMPTS[:4]]
    assert [g.token_ids for g in drafted] == own
    assert [g.token_ids for g in alone] == own[:4]
    for g in (*drafted, *alone):
        assert g.stats.accepted.get("head", 0) < g.stats.drafted["head"]


@pytest.mark.parametrize("target", TARGETS)
def test_guesses_are_the_modules_over_the_whole_text(
    bundle: Path, drafter: TinyDrafter, model: PreTrainedModel, guesses, target: str
) -> None:
    """After rejections, in a batch, after prompt chunks and preemption."""
    with load(bundle, target=target, max_batch=8, prefill_chunk=16) as engine:
        block = engine.backend.kv_bytes_per_token * 16
        engine.generate(PROMPTS, ASKED)
    compare(guesses, drafter, model, least=100)
    guesses.clear()
    with load(bundle, target=target, max_batch=8, prefill_chunk=16, kv_memory=12 * block, prefix_cache=False) as engine:
        engine.generate(PROMPTS, ASKED)
        assert engine.stats().preemptions > 0
    compare(guesses, drafter, model, least=100)


def test_guesses_after_a_hit_in_the_prefix_cache(
    bundle: Path, drafter: TinyDrafter, model: PreTrainedModel, guesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: the pair at the end of a shared prefix holds the next token of the text that left it there."""
    read: list[Pairs] = []

    def spy(context: ExecutionContext, pairs: list[Pairs], guess: bool = True) -> DraftGuesses:
        read.extend(pairs)
        return run_draft_head(context, pairs, guess)

    monkeypatch.setattr(head_drafter, "run_draft_head", spy)
    first, second = [*range(20, 52), 90, 91, 92], [*range(20, 52), 3, 4, 5]
    with load(bundle, max_batch=2) as engine:
        (own,) = engine.generate([first], ASKED)
        guesses.clear()
        read.clear()
        other, again = (engine.generate([prompt], ASKED)[0] for prompt in (second, [*first, *own.token_ids]))
        assert other.stats.prefix_tokens == 32 and again.stats.prefix_tokens >= 32
    assert (read[0].slot, [*read[0].tokens]) == (31, second[32:])
    compare(guesses, drafter, model, least=20)


@pytest.mark.parametrize("weights", slow_but(["source", "int4"], "int4"))
def test_with_exits_and_low_bit_weights(model: PreTrainedModel, drafter: TinyDrafter, tmp_path: Path, weights: str) -> None:
    """Segments of exits, and the graph of all layers, keep their bits; exits do not draft beside a head with a cache."""
    loaded = LoadedModel(tiny_model("llama"), None, "tiny")
    if weights == "int4":
        loaded = quantize_loaded(loaded, weights, "rtn", QUIET)
    exits = [ExitInfo(1, "linear", "max_probability", 0.05, 0.97)]
    write_calibration(tmp_path / "calibration", exits, fingerprint(loaded), LAYERS, model.config.hidden_size)
    config = ExportConfig(max_seq_len=SLOTS, weights=weights, quantizer="rtn", targets=TARGETS)
    calibration = read_exit_calibration(tmp_path / "calibration")
    (tmp_path / "bundle").mkdir()
    write_bundle(loaded, tmp_path / "bundle", config, QUIET, calibration, drafter=measured(TinyDrafter(loaded.model, (1, 2, 3))))
    for target in TARGETS:
        texts = {}
        for draft in ("none", "router", "all"):
            options = replace(ALONE, policy="exact", target=target, depth=DepthOptions(draft=draft), max_batch=2)
            with Engine.load(tmp_path / "bundle", options) as engine:
                texts[draft] = [g.token_ids for g in engine.generate(PROMPTS[:3], ASKED)]
        assert texts["router"] == texts["none"] == texts["all"], target


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "nanbeige"])
def test_recurrent_and_looped_models(family: str, tmp_path: Path, guesses) -> None:
    """Breaks: a launch of the head, which reads no states, begins a text anew in them or moves them to the other buffer; or its
    cache is taken for one of a loop. With prefix hits, chunks beside decodes, and preemption."""
    other = made(nanbeige()) if family == "nanbeige" else family_model(family)
    drafter = TinyDrafter(other, (1,))
    write_bundle(LoadedModel(other, None, "tiny"), tmp_path, CONFIG, QUIET, drafter=measured(drafter))
    with load(tmp_path, "full", max_batch=4) as engine:
        own = [g.token_ids for g in engine.generate(PROMPTS, ASKED)]
        longer = [[*prompt, *text] for prompt, text in zip(PROMPTS[:3], own, strict=False)]
        more = [g.token_ids for g in engine.generate(longer, ASKED)]
        block = engine.backend.kv_bytes_per_token * 16 + engine.backend.state_bytes
    with load(tmp_path, max_batch=4, prefill_chunk=16) as engine:
        drafted, later = engine.generate(PROMPTS, ASKED), engine.generate(longer, ASKED)
    assert all(g.stats.drafted["head"] for g in drafted) and any(g.stats.prefix_tokens for g in later)
    assert [g.token_ids for g in drafted] == own and [g.token_ids for g in later] == more
    guesses.clear()
    with load(tmp_path, max_batch=8, prefill_chunk=16, kv_memory=9 * block, prefix_cache=False) as engine:
        assert [g.token_ids for g in engine.generate(PROMPTS, ASKED)] == own
        assert engine.stats().preemptions > 0
    compare(guesses, drafter, other, least=50)
    options = EngineOptions(policy="exact", verify=False, max_batch=8, prefill_chunk=16, kv_memory=9 * block)
    with Engine.load(tmp_path, options) as engine:  # with all drafters, which leave the head out where loops are rows
        assert [g.token_ids for g in engine.generate(PROMPTS, ASKED)] == own


def test_a_target_without_the_head(bundle: Path) -> None:
    """Breaks: a head that was asked for never guesses, or one that is missing keeps other drafters from it."""
    opened, options = Bundle.open(bundle, verify=False), replace(ALONE, policy="exact", target="torch", max_batch=4)
    info = opened.manifest.targets["torch"]
    bare = replace(info, graphs={name: file for name, file in info.graphs.items() if name not in (UNCUT, DRAFT)})
    manifest = replace(opened.manifest, targets={**opened.manifest.targets, "torch": bare})
    without, asked = replace(opened, manifest=manifest), replace(options, depth=DepthOptions(draft="head"))
    with pytest.raises(ParamsError, match="no draft head for target torch; use target cpu, or set draft to all"):
        Engine(without, asked)
    with Engine(without, replace(asked, policy="full")) as full, Engine(without, options) as exact:
        own, drafted = (engine.generate(PROMPTS[:3], ASKED) for engine in (full, exact))
        assert not exact.policy.uses_draft_head
    assert [g.token_ids for g in drafted] == [g.token_ids for g in own]


@pytest.mark.parametrize("draft, layers", [("head", LAYERS + 1), ("ngram", LAYERS)])
def test_rows_have_a_cache_for_a_head_that_guesses_only(bundle: Path, draft: str, layers: int) -> None:
    """Breaks: keys and values of a head that never guesses take memory from texts, or one that guesses has none."""
    manifest, options = read_manifest(bundle), EngineOptions(policy="exact", max_batch=1, verify=False)
    bytes_of = {layer: 4 * kv.heads * (kv.key_dim + kv.value_dim) for layer, kv in manifest.caches.items()}
    with Engine.load(bundle, replace(options, depth=DepthOptions(draft=draft))) as engine:
        texts = [engine.generate([PROMPTS[3]], ASKED)[0].token_ids for _ in range(2)]
        assert engine.stats().prefix_bytes == 4 * 16 * sum(bytes_of[layer] for layer in range(layers))
        with engine.with_options(replace(options, policy="full")) as full:
            assert [g.token_ids for g in full.generate([PROMPTS[3]] * 2, ASKED)] == texts
            assert full.stats().prefix_bytes == 4 * 16 * sum(bytes_of[layer] for layer in range(LAYERS))


def test_a_graph_that_differs_from_the_module_is_refused(
    model: PreTrainedModel, drafter: TinyDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: a head traced wrongly would guess badly without a message."""

    def wrong(*arguments):
        traced = trace_drafter(*arguments)
        node = next(node for node in traced.step.graph if node.op_type == "Attention")
        node.attributes.add(ir.AttrFloat32("scale", 2 * node.attributes["scale"].value))
        return traced

    monkeypatch.setattr("tide_export.export_run.trace_drafter", wrong)
    with pytest.raises(VerificationError, match=f"{DRAFT}, {STATES}"):
        write_bundle(LoadedModel(model, None, "tiny"), tmp_path, CONFIG, QUIET, drafter=measured(drafter))


@pytest.mark.parametrize(
    ("config", "says"), [({"targets": ("cuda",), "dtype": "fp16"}, "--target cpu"), ({"kv": "int8"}, "--kv int8")]
)
def test_what_cannot_be_built_is_refused(
    model: PreTrainedModel, drafter: TinyDrafter, tmp_path: Path, config: dict, says: str
) -> None:
    with pytest.raises(ParamsError, match=says):
        write_bundle(LoadedModel(model, None, "tiny"), tmp_path, ExportConfig(**config), QUIET, drafter=measured(drafter))
