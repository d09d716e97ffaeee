"""Predictions held against the clock: which policies run, ratios of summed times, whether a recommendation was right, and exits
that torch runs as they were calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from calibrate.cost_model import table
from calibrate.synthetic_calibration import synthetic_file
from export.architectures import tiny_model
from rich.console import Console
from tide_bench.report import Report
from tide_calibrate.exit_heads import make_head
from tide_calibrate.exits_file import write_exits
from tide_calibrate.model.frozen import FrozenModel
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo, StepCost
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.exact import ExactDepth

from benchmarks import predicted_speedup
from benchmarks.arms.answers import Answer, add_answers
from benchmarks.arms.engine_arm import LoggedEngine
from benchmarks.arms.policy_cases import Case, answer_case, make_case
from benchmarks.arms.turns import Turn
from benchmarks.exits.current_costs import current_costs
from benchmarks.exits.recalled_exits import recalled_exits
from benchmarks.predicted_speedup import add_results, measure, total_ratio
from tide_export.calibration.calibration_file import EXITS_NAME

EXIT = ExitInfo(1, "identity", "max_probability", 0.2, exit_threshold=0.3)


def turns(*seconds: float) -> list[Turn]:
    return [Turn([[1, 2]], one, layers_per_token=6.0, base_seconds=4.0) for one in seconds]


def test_long_texts_weigh_more() -> None:
    """Predictions are of summed times; a median of ratios would let short easy texts hide long hard ones."""
    ratio, low, high = total_ratio(turns(1.0, 1.0, 4.0))
    assert ratio == pytest.approx(2.0)
    assert low <= ratio <= high
    assert (low, high) == pytest.approx((1.0, 4.0))


def test_the_worst_error_counts_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction that is too low is as wrong as one that is too high."""
    report = Report("predicted_speedup")
    arms = {"a": turns(1.0, 1.0), "b": turns(2.0, 2.0)}
    add_results(report, {"a": (3.2, 4.0), "b": (2.1, 2.2)}, arms)
    assert report.results["predicted_over_measured_a"] == pytest.approx(0.8)
    assert report.results["predicted_worst_error_pct"] == pytest.approx(20)
    assert report.results["replayed_worst_error_pct"] == pytest.approx(10)
    assert "3.20" in capsys.readouterr().out


def test_exits_are_recalled_with_their_weights(tmp_path: Path) -> None:
    """An untrained translator in place of the calibrated one would blame the cost model for the head's guesses."""
    model = FrozenModel(tiny_model("llama"))
    head = make_head("linear", model, 1, rank=4)
    assert head.translator is not None
    torch.nn.init.normal_(head.translator.up)
    write_exits(tmp_path / EXITS_NAME, {1: head}, {})
    file = synthetic_file([ExitInfo(1, "linear", "max_probability", 0.5, exit_threshold=0.9)])
    (recalled,) = recalled_exits(model, file, tmp_path).values()
    states = {1: torch.randn(1, 3, model.hidden_size)}
    assert torch.equal(recalled.head.logits(states), head.logits(states))


def load(bundle: Path) -> Engine:
    """With threads of its own: shared ones would be all that this process' later engines could have."""
    return Engine.load(bundle, EngineOptions(threads=ThreadOptions(1)))


def answered(recommended: str, **predicted: float) -> CalibrationInfo:
    return CalibrationInfo([EXIT], 4, recommended, predicted={"full": 1.0, "exact:ngram": 9.0, **predicted})


@pytest.mark.parametrize(
    ("recommended", "measured"),
    [("exact", ("exact_all", "exact")), ("exit", ("exit_strict", "exit")), ("full", ("exit_strict", "exit"))],
)
def test_an_answer_is_judged_by_the_policy_that_it_is_about(recommended: str, measured: tuple[str, str]) -> None:
    """A "no" would be confirmed by a policy that nobody expected to be fast."""
    name, case = answer_case(answered(recommended, exact=1.005, exit=1.01))
    assert (name, case.policy) == measured and case.exits == [EXIT]


def test_a_calibration_without_predictions_is_refused() -> None:
    """There would be nothing to compare."""
    with pytest.raises(typer.BadParameter, match="--costs none"):
        answer_case(CalibrationInfo([], 0, "full"))


def answer(recommended: str, predicted: float, measured: float) -> Answer:
    return Answer("m", recommended, "exact", predicted, 1.1 * measured, measured, measured, measured, 0.01)


@pytest.mark.parametrize(
    ("recommended", "measured", "right"),
    [("exact", 1.2, True), ("exact", 0.98, False), ("full", 1.02, True), ("full", 1.1, False)],
)
def test_yes_and_no_can_both_be_wrong(recommended: str, measured: float, right: bool) -> None:
    """A calibration that always says the same would look right."""
    assert answer(recommended, 1.0, measured).right is right


def test_only_recommended_policies_have_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that is not recommended would count as a broken promise."""
    report = Report("predicted_speedup")
    add_answers(report, [answer("exact", 1.6, 2.0), answer("exact", 2.1, 2.0), answer("full", 0.5, 1.0)], Console(width=120))
    assert report.results == pytest.approx(
        {
            "other_load_pct": 1,
            "worst_prediction_error_pct": 20,
            "worst_replay_error_pct": 10,
            "right_answers": 3,
            "models": 3,
        }
    )
    assert [row["right"] for row in report.rows] == [True] * 3
    assert "recommended" in capsys.readouterr().out


def test_drafts_keep_within_what_low_bit_kernels_allow(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With int4 weights `exact` would be measured on launches that an engine never makes."""
    monkeypatch.setattr(Manifest, "rounds", lambda *_: True)
    with load(exits_bundle) as engine:
        logged = LoggedEngine(engine)
        monkeypatch.setitem(vars(engine.backend), "invariant_tokens", 4)
        policy = make_case(Case("exact", [EXIT]), logged)
    assert isinstance(policy, ExactDepth) and policy.invariant_tokens == 4


def test_costs_of_now_keep_the_host_and_scale_the_graphs() -> None:
    """Predictions replayed at the speed that the machine had at calibration would blame the model for the machine."""
    before = table()
    passes = [replace(before, steps=[StepCost(1, seq, 0.0, ms, 0.0, 0.0, 0.0) for seq, ms in ((1, 3.0), (16, 12.0))])]
    now = current_costs(before, passes, num_layers=8)
    one, sixteen = (next(step for step in now.steps if (step.rows, step.seq) == (1, seq)) for seq in (1, 16))
    assert 8 * one.layer_ms + one.head_ms == pytest.approx(3.0)
    assert 8 * sixteen.layer_ms + sixteen.head_ms == pytest.approx(12.0)
    assert one.host_ms == before.steps[0].host_ms and now.unsplit_ms == pytest.approx(3.0 + one.host_ms)


def test_texts_of_exact_end_where_the_model_ends_them(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed behind an end token, which no prediction covers, would count; `exit` has texts of other lengths, so all go on."""
    monkeypatch.setattr(predicted_speedup, "NEW_TOKENS", 24)
    monkeypatch.setattr(predicted_speedup, "load_second", load)
    groups = [[[first, 40, 99, 7]] for first in range(3, 40)]
    lengths = {}
    for policy in ("exact", "exit"):
        turns, now = measure(exits_bundle, {policy: Case(policy, [EXIT])}, groups, table())
        lengths[policy] = [len(turn.tokens[0]) for turn in turns[policy]]
        assert now.unsplit_ms < table().unsplit_ms, "a tiny model's passes take less than those of the table"
    assert min(lengths["exact"]) < 24 and set(lengths["exit"]) == {24}
