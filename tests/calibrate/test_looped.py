"""Calibration of looped models: boundaries and tails count every loop, and the model's own gate competes as a router."""

from pathlib import Path

import numpy as np
import pytest
import torch
from calibrate.cost_model import table
from export.looped_tiny import FORMS, VOCAB, made, ouro, saved
from tide_calibrate import training_plan
from tide_calibrate.calibrate import calibrate
from tide_calibrate.capture.forward_pass import hidden_states
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.costs.measure import save_costs
from tide_calibrate.exit_heads import make_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.model.tail import ModelTail
from tide_calibrate.report import draw
from tide_calibrate.text.documents import Windows
from tide_calibrate.traces.continuations import continue_prompts
from tiny_tokenizer import write_byte_tokenizer
from transformers import PreTrainedModel

from tide_export.calibration.calibration_file import EXITS_NAME
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.calibration.exits_file import read_exits
from tide_export.graphs.exit_gate import gate_router
from tide_export.load import load_model

TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = saved(request.param, tmp_path_factory.mktemp("model"))
    return load_model(str(folder), "fp32", trust_remote_code=request.param == "own", tokenizer="none").model


@torch.no_grad()
def test_heads_run_from_every_boundary(model: PreTrainedModel) -> None:
    """A head would get the state of the first loop's layer in place of its own, or run on from the wrong loop."""
    states: dict[int, torch.Tensor] = {}
    with hidden_states(model, range(100), states.__setitem__):
        logits = model(torch.arange(16).reshape(2, 8), use_cache=False).logits
    frozen, close = FrozenModel(model), dict(rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    depth = frozen.num_layers
    assert depth > len(model.model.layers) and list(states) == list(range(depth + 1))
    torch.testing.assert_close(frozen.lm_head(states[depth]), logits, **close)
    for start in range(1, depth):
        tail = ModelTail(model, start)
        torch.testing.assert_close(tail(states[start]), logits, **close)
        torch.testing.assert_close(tail.final_states(states[start]), states[depth], **close)
    torch.testing.assert_close(make_head("tail:1", frozen, depth - 1).logits(states), logits, **close)


def test_continuations_are_the_models_own(model: PreTrainedModel) -> None:
    """Speed would be predicted on texts that a model with a cache for one loop writes."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 24)).astype(np.int32)
    windows = Windows(tokens, np.full(4, 24, np.int32), np.arange(4, dtype=np.int32))
    own, lengths = continue_prompts(model, windows, np.array([1, 1, 2, 2], np.int8), 4, 8)
    prompts = torch.from_numpy(own.tokens[:, : lengths[0]]).long()
    text = model.generate(prompts, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert own.tokens.tolist() == text.tolist()


@pytest.mark.parametrize("router", ["gate", "max_probability"])
def test_the_gate_is_calibrated(tmp_path: Path, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate would be of another router than the bundle's, or a gate that was trained be left out of the choice."""
    monkeypatch.setattr(training_plan, "STEPS", 4)
    monkeypatch.setattr(draw, "png", lambda figure: b"")
    model = made(ouro())
    with torch.no_grad():
        for layer in model.model.layers:  # a second loop changes little, so that the first agrees
            layer.input_layernorm_2.weight.mul_(0.02)
            layer.post_attention_layernorm_2.weight.mul_(0.02)
        model.model.norm.weight.fill_(1.0)
    assert candidate_layers("auto", 96, 4) == [24, 48, 72]  # where the model was trained to stop
    source = tmp_path / "model"
    model.save_pretrained(source)
    write_byte_tokenizer(source)
    (tmp_path / "texts").mkdir()
    for number, start in enumerate(range(0, 9600, 800)):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[start : start + 800])
    save_costs(table(layers=3), tmp_path / "costs.json")
    small = {"window": 64, "max_windows": 40, "prompts": 8, "new_tokens": 12, "max_disagreement": 0.3, "draft_head": False}
    config = CalibrationConfig(heads="identity", router=router, **small)
    file = calibrate(str(source), str(tmp_path / "texts"), tmp_path / "calib", config, costs=str(tmp_path / "costs.json"))
    assert {exit.router for exit in file.calibration.exits} == {router} and file.num_layers == 3
    gate, written = gate_router(load_model(str(source), "fp32")), read_exits(tmp_path / "calib" / EXITS_NAME).routers
    for exit in file.calibration.exits:
        assert router != "gate" or all(np.array_equal(written[exit.checkpoint][name], gate[name]) for name in gate)
    read_exit_calibration(tmp_path / "calib").check(load_model(str(source), "fp32"))
