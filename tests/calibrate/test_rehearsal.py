"""Speeds that a calibration measures: which policies run, on how many prompts, and how far the range reaches."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from export.architectures import LAYERS, tiny_model
from export.stub_calibration import draft_tensors, write_calibration
from runtime.conftest import bundle, exits_bundle, hf_model_directory, load
from tide_calibrate import rehearsal
from tide_calibrate.placement.candidates import EXACT
from tide_calibrate.rehearsal import DRAFT_HEAD, MIN_PROMPTS, WITHOUT_HEAD, _rehearsal, measure_policies, rehearse
from tide_calibrate.text.documents import Windows
from tide_calibrate.train import Captured
from tide_runtime import Engine, ThreadOptions
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

from tide_export import ExportConfig, export
from tide_export.load import fingerprint, load_model

__all__ = ["bundle", "exits_bundle", "hf_model_directory", "load"]


def test_the_range_is_of_another_sample() -> None:
    """A range of the mean alone would miss half of what other texts measure."""
    own = np.linspace(0.4, 0.8, 40)
    found = _rehearsal(np.stack([np.ones(40), own], 1))
    assert found.speedup == pytest.approx(40 / own.sum(), abs=1e-3)
    random = np.random.default_rng(1)
    others = [40 / random.choice(own, 40).sum() for _ in range(2000)]
    assert np.mean([found.low <= one <= found.high for one in others]) > 0.9
    assert _rehearsal(np.ones((9, 2))).high == 1.0


def test_each_policy_that_the_bundle_has_is_measured(exits_bundle: Path, bundle: Path) -> None:
    """A speed of `exit` would be promised where no threshold is certified."""
    prompts = [[3 + n, 40, 99, 7] for n in range(2 * MIN_PROMPTS)]
    found = measure_policies(exits_bundle, prompts, 8, ["exact", "exit", EXACT], seconds=0.0)
    assert set(found) == {"exact", "exit", EXACT}
    assert {one.prompts for one in found.values()} == {MIN_PROMPTS}
    assert all(0 < one.low <= one.speedup <= one.high for one in found.values())
    assert set(measure_policies(bundle, prompts[:2], 4, ["exact", "exit"], seconds=0.0)) == {"exact"}


@pytest.mark.parametrize("exits", [[], [ExitInfo(1, "linear", "max_probability", 0.05)]], ids=["text", "text and exits"])
def test_exact_runs_without_its_draft_head_too(exits: list[ExitInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a draft head that costs more than it gains stays in the bundle, or one is compared with `full` or with nothing."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    own = fingerprint(load_model(str(tmp_path / "model"), "fp32", tokenizer="none"))
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    write_calibration(tmp_path / "calib", exits, own, LAYERS, hidden, draft_tensors(hidden, 32, vocabulary))
    config = ExportConfig(max_seq_len=64, tokenizer="none", targets=("cpu",), calibration=str(tmp_path / "calib"), verify=False)
    export(str(tmp_path / "model"), tmp_path / "engine", config)
    in_turn, taken = rehearsal._in_turn, []

    def stubbed(engines: list[Engine], *rest: object) -> np.ndarray:
        taken.append(in_turn(engines, *rest).shape)  # type: ignore[arg-type]
        seconds = [1.0 if e.policy.name == "full" else 0.8 if e.policy.uses_draft_head else 0.5 for e in engines]
        return np.tile(seconds, (9, 1))

    monkeypatch.setattr(rehearsal, "_in_turn", stubbed)
    found = measure_policies(tmp_path / "engine", [[3, 40, 99, 7]] * 2, 4, ["exact"], seconds=0.0, threads=ThreadOptions(1))
    assert taken[0] == (2, 3)
    assert (found["exact"].speedup, found[WITHOUT_HEAD].speedup, found[DRAFT_HEAD].speedup) == (1.25, 2.0, 0.625)


def test_prompts_come_from_the_test_split() -> None:
    """Speeds would be of texts on which the exits were chosen, or of none."""
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    windows = Windows(tokens, np.full(4, 6, np.int32), np.array([7, 7, 9, 9], np.int32))
    continuations = SimpleNamespace(split=np.array([1, 1, 2, 2], np.int8), lengths=windows.lengths)
    captured = Captured(None, windows, np.array([2, 2, 3, 2], np.int32), continuations, None)  # type: ignore[arg-type]
    assert captured.held_out_prompts() == [[12, 13, 14], [18, 19]]


@pytest.mark.slow
def test_a_process_that_fails_says_what_to_do(tmp_path: Path) -> None:
    missing = SimpleNamespace(target="cpu", path=lambda: tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match=r"speeds could not be measured \(.*nowhere.*--costs none"):
        rehearse(missing, [[1, 2]], 4, ["exact"], 0.0)  # type: ignore[arg-type]
