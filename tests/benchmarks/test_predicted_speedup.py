"""Predictions held against the clock: which policies are judged, ratios of summed times, and where texts end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, ThreadOptions

from benchmarks import predicted_speedup
from benchmarks.arms.turns import Turn
from benchmarks.predicted_speedup import Answer, add_answers, judged_policy, measured, total_ratio


def turns(*seconds: float) -> list[Turn]:
    return [Turn([[1, 2]], one, base_seconds=4.0) for one in seconds]


def test_long_texts_weigh_more() -> None:
    """Predictions are of summed times; a median of ratios would let short easy texts hide long hard ones."""
    ratio, low, high = total_ratio(turns(1.0, 1.0, 4.0))
    assert ratio == pytest.approx(2.0)
    assert low <= ratio <= high
    assert (low, high) == pytest.approx((1.0, 4.0))


@pytest.mark.parametrize(("recommended", "judged"), [("exact", "exact"), ("exit", "exit"), ("full", "exit")])
def test_an_answer_is_judged_by_the_policy_that_it_is_about(recommended: str, judged: str) -> None:
    """A "no" would be confirmed by a policy that nobody expected to be fast."""
    assert judged_policy(recommended, {"full": 1.0, "exact:ngram": 9.0, "exact": 1.005, "exit": 1.01}) == judged


def test_a_calibration_without_predictions_is_refused() -> None:
    """There would be nothing to compare."""
    with pytest.raises(typer.BadParameter, match="--costs none"):
        judged_policy("full", {"full": 1.0})


def answer(recommended: str, predicted: float, speed: float, policy: str = "exact", judged: bool = True) -> Answer:
    return Answer(
        f"m{predicted:g}".replace(".", ""),
        recommended,
        policy,
        policy,
        1,
        judged,
        predicted,
        (0.9 * predicted, 1.1 * predicted),
        speed,
        speed,
        speed,
        0.01,
    )


@pytest.mark.parametrize(
    ("recommended", "speed", "right"),
    [("exact", 1.2, True), ("exact", 0.98, False), ("full", 1.02, True), ("full", 1.1, False)],
)
def test_yes_and_no_can_both_be_wrong(recommended: str, speed: float, right: bool) -> None:
    """A calibration that always says the same would look right."""
    assert answer(recommended, 1.0, speed).right is right


def test_only_recommended_policies_have_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that is not recommended would count as a broken promise."""
    report = Report("predicted_speedup")
    found = [answer("exact", 1.6, 2.0), answer("exact", 2.1, 2.0), answer("full", 0.5, 1.0)]
    add_answers(report, [*found, answer("exact", 9.0, 1.0, "exit", judged=False)])
    assert report.results["worst_prediction_error_pct"] == pytest.approx(20)
    assert (report.results["right_answers"], report.results["models"]) == (3, 3)
    assert report.results["predicted_over_measured_exit1_m9"] == pytest.approx(9)
    assert [row["right"] for row in report.rows] == [True, True, True, None]
    assert "recommended" in capsys.readouterr().out


def test_texts_of_exact_end_where_the_model_ends_them(exits_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed behind an end token, which no prediction covers, would count; `exit` has texts of other lengths, so all go on."""
    monkeypatch.setattr(predicted_speedup, "NEW_TOKENS", 24)
    prompts = [[first, 40, 99, 7] for first in range(3, 40)]
    with Engine.load(exits_bundle, EngineOptions(threads=ThreadOptions(1))) as weights:
        lengths = {p: [len(turn.tokens[0]) for turn in measured(weights, p, prompts)[1]] for p in ("exact", "exit")}
    assert min(lengths["exact"]) < 24 and set(lengths["exit"]) == {24}


def test_a_policy_that_runs_as_another_is_named_so(exits_bundle: Path, load: Callable[..., Engine]) -> None:
    """A prediction of `exact` would be held against the speed of `full`, which machines with other kernels run in its place."""
    with Engine.load(exits_bundle, EngineOptions(threads=ThreadOptions(1))) as weights:
        limited = weights.with_options(weights.options).bits_limitation
        title, _ = measured(weights, "exact", [[5, 9, 3, 7]])
    assert title == ("exact" if limited is None else f"exact ({limited})")
