"""The example package of docs/extending.md, found by its entry points only: calibrated, exported, and run without the package."""

import io
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate.cost_model import table
from rich.console import Console
from safetensors.numpy import load_file
from tide_calibrate import placed_exit, training_plan
from tide_calibrate.calibrate import calibrate
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.costs.measure import save_costs
from tide_calibrate.report.terminal import print_summary
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import Manifest, read_manifest
from tide_runtime.depth import executor
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence
from tide_runtime.errors import CalibrationError, ParamsError, TargetError, VerificationError
from tide_runtime.outputs import Generation
from tide_runtime.plugins import HEADS, ROUTERS, extension
from tiny_tokenizer import write_byte_tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export import ExportConfig, export
from tide_export.calibration.calibration_file import read_calibration
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.graphs.exit_modules import ExitModules
from tide_export.passes.base import PassReport, PlacedPass
from tide_export.targets import TARGETS, with_packages
from tide_export.verify.verify_exits import verify_exits

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "extensions"
PACKAGE = "tide-extensions 0.1.0"
LAYERS, HIDDEN = 6, 32
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")
PROMPTS = [[72, 101, 108, 108, 111], [84, 104, 101, 32]]


def install(site: Path, entries: dict[str, dict[str, str]], version: str = "0.1.0") -> None:
    """What pip writes of a package whose files are elsewhere on the path."""
    folder = site / "tide_extensions.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tide-extensions\nVersion: {version}\n")
    lines = [line for group, of in entries.items() for line in (f"[{group}]", *(f"{name} = {at}" for name, at in of.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, str]]:
    declared: dict[str, dict[str, str]] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    return declared | {"tide.routers": declared["tide.routers"] | {"first-channel": f"{__name__}:FirstChannel"}}


@pytest.fixture
def installed(entries: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site folder with the example's metadata."""
    install(tmp_path / "site", entries)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


class FirstChannel(nn.Module):
    """A router that scores the state alone, and is fitted: the median of the right tokens scores 1/2."""

    reads_logits = False

    def __init__(self, hidden: int, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("median", torch.zeros(1))

    def fit(self, states: torch.Tensor, right: torch.Tensor) -> None:
        self.median = states[right][:, 0].median()[None]

    def scores(self, states: torch.Tensor, logits: torch.Tensor | None, total: torch.Tensor | None) -> torch.Tensor:
        return (states[..., 0] - self.median).sigmoid()


class Careless:
    """A drafter whose tokens are of no vocabulary."""

    def __init__(self, limit: int, manifest: Manifest) -> None:
        self.tokens = [1, manifest.model.vocab_size, -1] * limit

    def draft(self, context: object, states: list[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            state.guess = Guess(self.tokens, [1.0] * len(self.tokens), "another name")
        return []


NO_PLACE = PlacedPass(lambda model, context: PassReport("none"), ("cpu",), after="nothing")
NO_TARGET = PlacedPass(lambda model, context: PassReport("none"), ("tpu",), after="canonicalize")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose late layers hardly change the state, so that early exits agree most of the time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.03)
            layer.mlp.down_proj.weight.mul_(0.03)
    folder = tmp_path_factory.mktemp("models") / "agreeing"
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def calibrated(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Calibrate with a head and a router."""
    monkeypatch.setattr(training_plan, "STEPS", 24)
    monkeypatch.setattr(placed_exit, "_draw", lambda *_: None)  # test_report.py draws
    for number in range(12):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[number * 900 : number * 900 + 900])
    save_costs(table(layers=LAYERS), tmp_path / "costs.json")

    def run(head: str, router: str) -> Path:
        config = CalibrationConfig(
            heads=head, candidates="2", router=router, window=64, max_windows=40, prompts=16, new_tokens=16, max_disagreement=0.3,
            draft_head=False,
        )  # fmt: skip
        calibrate(str(source), str(tmp_path / "texts"), tmp_path / "calib", config, costs=str(tmp_path / "costs.json"))
        return tmp_path / "calib"

    return run


def exported(source: Path, calibration: Path | None, out: Path, **options: Any) -> Path:
    folder = str(calibration) if calibration is not None else None
    export(str(source), out, ExportConfig(calibration=folder, max_seq_len=64, **{"targets": ("cpu",), **options}))
    return out


def generated(bundle: Path, policy: str, together: int = 1, **depth: Any) -> list[Generation]:
    options = EngineOptions(policy=policy, depth=DepthOptions(**depth), threads=ThreadOptions(1), max_batch=together)
    params = GenerationParams(max_new_tokens=48, ignore_eos=True)
    with Engine.load(bundle, options) as engine:
        batches = [PROMPTS] if together > 1 else [[ids] for ids in PROMPTS]
        return [row for batch in batches for row in engine.generate(batch, params)]


def uninstall(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(installed)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tide_extensions"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(EXAMPLE)])


def check_against_eager(bundle: Path, source: Path, calibration: Path, outputs: list[Generation], threshold: float) -> None:
    """Every token is the eager exit's, where its eager score allows that, or the full model's."""
    model = LlamaForCausalLM.from_pretrained(source).eval()
    (info,) = read_calibration(calibration).calibration.exits
    modules = ExitModules.of(info, read_exit_calibration(calibration).tensors, HIDDEN)
    early = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            full = model(torch.tensor([ids]), output_hidden_states=True)
            states = full.hidden_states[info.checkpoint][0]
            translated = states if modules.translator is None else modules.translator(states)
            logits = model.lm_head(model.model.norm(translated))
            scores = modules.router.scores(states, logits, logits.logsumexp(-1))
        for number, depth in enumerate(output.stats.token_depths, len(prompt)):
            chosen = logits if depth == info.checkpoint else full.logits[0]
            assert ids[number + 1] == int(chosen[number].argmax())
            assert depth == LAYERS or float(scores[number]) >= threshold - 1e-4
            early += depth == info.checkpoint
    assert early > 5, "hardly a token left early"


def test_a_head_and_a_router_from_outside(
    installed: Path, source: Path, calibrated: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A researcher's head and router would not be trained, certified or compiled, or the bundle would need their package."""
    calibration = calibrated("bottleneck", "confidence-entropy")
    (info,) = read_calibration(calibration).calibration.exits
    assert (info.head, info.router, info.reads_logits) == ("bottleneck", "confidence-entropy", True)
    assert (info.head_package, info.router_package) == (PACKAGE, PACKAGE) and info.exit_threshold is not None
    shapes = {name: array.shape for name, array in load_file(calibration / "exits.safetensors").items()}
    assert shapes == {"translator.2.down": (4, HIDDEN), "translator.2.up": (HIDDEN, 4)}
    bundle = exported(source, calibration, tmp_path / "engine")
    manifest = read_manifest(bundle)
    assert manifest.calibration is not None and manifest.calibration.exits == [info]
    assert {"exit_2", "score_2"} <= {graph.name for graph in manifest.graphs}
    assert manifest.targets["cpu"].passes[f"quick_silu ({PACKAGE})"] == LAYERS
    tensors = read_exit_calibration(calibration).tensors
    assert [(c.graph, c.output) for c in verify_exits(bundle, tensors)] == [("exit_2", "hidden_out"), ("score_2", "score")]
    with pytest.raises(VerificationError, match="hidden_out of exit_2"):
        verify_exits(bundle, tensors | {"translator.2.up": tensors["translator.2.up"] + np.float32(0.05)})
    with pytest.raises(TargetError, match="torch runs no router that reads the head's logits"):
        exported(source, calibration, tmp_path / "torch", targets=("torch",))
    for policy, options, words in (
        ("exit", DepthOptions(), "router confidence-entropy of tide-extensions 0.1.0 reads logits"),
        ("exact", DepthOptions(draft="last-token"), "drafts with last-token, which the host drives"),
    ):
        assert words in str(make_policy(policy, manifest, options).device_plan())
    full, exact, early = (generated(bundle, *of) for of in (("full",), ("exact",), ("exit",)))
    check_against_eager(bundle, source, calibration, early, info.exit_threshold)
    beside = [generated(bundle, "exit", together, threshold=info.exit_threshold) for together in (1, 2)]
    assert [row.token_ids for row in beside[0]] == [row.token_ids for row in beside[1]], "a score depends on the batch"

    uninstall(installed, monkeypatch)
    assert [row.token_ids for row in generated(bundle, "exit")] == [row.token_ids for row in early]
    drafted = generated(bundle, "exact", draft="router")
    assert sum(row.stats.drafted["router"] for row in drafted) > 5
    assert [row.token_ids for row in drafted] == [row.token_ids for row in exact] == [row.token_ids for row in full]
    print_summary(read_calibration(calibration), Console(file=io.StringIO()))
    with pytest.raises(CalibrationError, match=f"calibrated with {PACKAGE}: there is no exit head 'bottleneck'"):
        exported(source, calibration, tmp_path / "again")
    install(installed, {"tide.exit_heads": {"bottleneck": "math:sqrt"}}, version="0.2.0")
    with pytest.raises(CalibrationError, match=f"{PACKAGE}, and tide-extensions 0.2.0 is installed"):
        exported(source, calibration, tmp_path / "again")


def test_a_router_scores_the_logits_of_a_tail_in_a_batch(
    installed: Path, source: Path, calibrated: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would score the logits of another sequence, or of the step before."""
    bundle = exported(source, calibrated("tail:1", "confidence-entropy"), tmp_path / "engine")
    judged = []
    decide = executor.head_score

    def head_score(info: ExitInfo, score: float, logits: np.ndarray, token: int) -> float:
        judged.append((score, torch.tensor(logits)))
        return decide(info, score, logits, token)

    monkeypatch.setattr(executor, "head_score", head_score)
    generated(bundle, "exit", together=2, threshold=0.02)
    router = extension(ROUTERS, "confidence-entropy")(HIDDEN)
    expected = [float(router.scores(logits, logits, logits.logsumexp(-1))) for _, logits in judged]
    np.testing.assert_allclose([score for score, _ in judged], expected, atol=1e-5)
    assert len(judged) > 20 and np.ptp(expected) > 0.02


def test_a_router_of_the_state_is_fitted_and_runs_before_the_head(
    installed: Path, source: Path, calibrated: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """A router without logits would be run after the head, which costs what it saves, or without what it learned."""
    calibration = calibrated("identity", "first-channel")
    (info,) = read_calibration(calibration).calibration.exits
    assert load_file(calibration / "exits.safetensors")["router.2.median"] != 0 and info.decides_before_head
    bundle = exported(source, calibration, tmp_path / "engine", targets=("cpu", "torch"))
    manifest = read_manifest(bundle)
    assert [t.name for graph in manifest.graphs if graph.name == "exit_2" for t in graph.outputs] == ["score"]
    assert f"quick_silu ({PACKAGE})" not in manifest.targets["torch"].passes
    check_against_eager(bundle, source, calibration, generated(bundle, "exit", threshold=0.4), 0.4)


def test_a_drafter_from_outside_changes_no_token(installed: Path, source: Path, tmp_path: Path) -> None:
    """Drafts of a package would not be used, or a token that the vocabulary lacks would end the engine."""
    bundle = exported(source, None, tmp_path / "engine", verify=False)
    full = [row.token_ids for row in generated(bundle, "full")]
    rows = generated(bundle, "exact", draft="last-token")
    assert [row.token_ids for row in rows] == full
    assert sum(row.stats.drafted["last-token"] for row in rows) > sum(row.stats.accepted["last-token"] for row in rows) > 0
    install(installed, {"tide.drafters": {"careless": f"{__name__}:Careless"}})
    rows = generated(bundle, "exact", draft="careless")
    assert [row.token_ids for row in rows] == full and sum(row.stats.drafted["careless"] for row in rows) > 0


def test_names_and_places_that_do_not_exist_are_refused(installed: Path, entries: dict[str, dict[str, str]]) -> None:
    """A researcher with a typing error would not learn what is there, or how to add to it."""
    for wrong, words in (
        (lambda: CalibrationConfig(heads="oracle"), "'oracle' is no exit head; known are .*bottleneck; .*tide.exit_heads"),
        (lambda: CalibrationConfig(heads="bottleneck:2"), "'bottleneck:2' is no exit head"),
        (lambda: CalibrationConfig(router="dice"), "router is 'dice'.*gate, confidence-entropy.*tide.routers"),
        (lambda: DepthOptions(draft="dice"), "draft is 'dice'.*none, last-token; .*tide.drafters .docs/extending.md"),
    ):
        with pytest.raises(ParamsError, match=words):
            wrong()
    for name, words in (
        ("NO_PLACE", "comes after nothing; target cpu has .*canonicalize"),
        ("NO_TARGET", "is for tpu; known are cpu"),
    ):
        install(installed, {"tide.passes": {"broken": f"{__name__}:{name}"}})
        with pytest.raises(TargetError, match=words):
            with_packages(TARGETS["cpu"])
    install(installed, {"tide.exit_heads": {"missing": "tide_extensions.no_such_file:Head"}})
    with pytest.raises(ParamsError, match=f"the exit head missing of {PACKAGE} cannot be imported"):
        extension(HEADS, "missing")
