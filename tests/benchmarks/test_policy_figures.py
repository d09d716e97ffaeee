"""The figures of the depth-policy benchmarks, on synthetic turns whose right figures are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tide_bench.output_checks import disagreement_rate, first_difference, identical_share
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.bundle.manifest import UNCUT as UNCUT_GRAPH
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.ablation import RULES, drafting_size, run_cell, task_figures
from benchmarks.arms import policy_arms
from benchmarks.arms.modelled_time import Launch, LaunchCounts, layers_of, modelled_ms
from benchmarks.arms.policy_arms import BASELINE
from benchmarks.arms.turns import EngineArm, Group, Turn, take_turns
from benchmarks.policies_cpu import LEAST_GROUPS, Case, add_policy_results, add_tables, cases, run_case, speed_figures

LAYERS = {"segment_0": 6, "segment_1": 18, "exit_6": 0, "head": 0}
UNCUT = {"segment_0": 24, "head": 0}


class FlatCosts(CostModel):
    """Launch 1, layer 2, head 10, exit graph 5, loop 3 at every shape, a tenth more for each token after the first."""

    def __init__(self) -> None:
        steps = [StepCost(1, s, *(part * (1 + 0.1 * (s - 1)) for part in (1.0, 2.0, 10.0, 5.0, 3.0))) for s in (1, 64)]
        super().__init__(CostTable("cpu", "", 1.0, steps), [0, 6, 24])


def test_ratio_is_the_median_of_pairs_and_of_the_total() -> None:
    """A slow moment of the machine would decide the ratio, or the interval would not hold it."""
    ratio = paired_ratio([2, 2, 2, 2, 20], [1, 1, 1, 1, 1])
    assert ratio.median == 2 and ratio.total == pytest.approx(28 / 5)
    assert ratio.low <= ratio.median <= ratio.high
    assert paired_ratio([3, 3], [2, 2]).low == paired_ratio([3, 3], [2, 2]).high == 1.5


def test_interval_narrows_with_more_pairs() -> None:
    """The interval would not show how certain the ratio is."""
    times = np.random.default_rng(1).lognormal(sigma=0.2, size=400).tolist()
    few, many = paired_ratio(times[:16], [1.0] * 16), paired_ratio(times, [1.0] * 400)
    assert many.high - many.low < few.high - few.low


def test_unpaired_times_are_refused() -> None:
    """Different prompts would be compared."""
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio([1, 2], [1])


def test_modelled_time_charges_every_launch() -> None:
    """A launch would be free, and theory promise more than can be had."""
    costs = FlatCosts()
    assert modelled_ms({Launch("segment_0", 1, 1, 1): 2}, LAYERS, costs) == pytest.approx(2 * (1 + 12))
    assert modelled_ms({Launch("head", 1, 1, 1): 1}, LAYERS, costs) == pytest.approx(13)
    assert modelled_ms({Launch("exit_6", 1, 1, 1): 1}, LAYERS, costs) == pytest.approx(5)
    assert modelled_ms({Launch("segment_0", 1, 1, 1): 1}, UNCUT, costs) == pytest.approx(48 + 10 + 3)
    assert modelled_ms({Launch("segment_1", 1, 5, 5): 1}, LAYERS, costs) == pytest.approx(1.4 * (1 + 36 + 9 + 3))


def test_speed_counts_the_tokens_after_the_first_of_every_row() -> None:
    """Prefill would be counted as decoding."""
    turn = Turn(
        [[1, 2, 3], [4, 5, 6]], 0.5, layers_per_token=12.0, depth=8.0, drafted=Counter(router=4), accepted=Counter(router=3)
    )
    figures = speed_figures([replace(turn, base_seconds=1.0)])
    assert figures["tokens_per_s"] == 8 and figures["ratio_median"] == 2
    assert figures["layers_per_token"] == 12 and figures["accepted_router"] == 0.75


def test_disagreement_counts_until_the_first_difference() -> None:
    """One wrong token would be counted again for everything that follows from it."""
    reference = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rows = [[0, 1, 9, 9, 9], [0, 1, 2, 3, 4]]
    assert disagreement_rate(rows, reference) == pytest.approx(1 / (2 + 4))
    assert identical_share(rows, reference) == pytest.approx(0.7)
    assert disagreement_rate(reference, reference) == 0
    assert first_difference([1, 2], [1, 2, 3]) is None


class CountingArm(EngineArm):
    """Takes ``seconds`` and notes when its turns came."""

    def __init__(self, name: str, seconds: list[float], order: list[str]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "left", (seconds, order))

    def turn(self, prompts: Group, params: GenerationParams) -> Turn:
        seconds, order = self.left  # type: ignore[attr-defined]
        order.append(f"{self.name}{params.seed}")
        return Turn([[0, 1]], seconds.pop(0))


def test_arms_and_the_baseline_begin_in_turn() -> None:
    """One of two neighbours would always find the caches and clocks that the other leaves, or be held against a far one."""
    order: list[str] = []
    base, arms = CountingArm("u", [3.0, 5.0, 7.0, 9.0], order), {n: CountingArm(n, [1.0, 1.0], order) for n in "ab"}
    times, turns = take_turns(base, arms, [[[1]], [[2]]], GenerationParams(max_new_tokens=1))
    assert order == ["u0", "a0", "u0", "b0", "b1", "u1", "a1", "u1"]
    assert [turn.seconds for turn in times] == [4.0, 8.0]
    beside = {name: [turn.base_seconds for turn in own] for name, own in turns.items()}
    assert beside == {"a": [3.0, 9.0], "b": [5.0, 7.0]}


def test_no_turn_drafts_from_an_earlier_one(load: Callable[..., Engine]) -> None:
    """The baseline, which has a turn beside every arm, would copy its own first answer in all the others."""
    params = GenerationParams(max_new_tokens=16, ignore_eos=True)
    repeatable = DepthOptions(tuning=DepthTuning(clock_rate=0.0))
    with load(policy="exact", depth=repeatable) as engine, engine.with_options(engine.options) as other:
        baseline, arm = EngineArm("exact", engine), EngineArm("exact", other)
        alone = EngineArm("exact", engine).turn([[5, 9, 3]], params)
        base, turns = take_turns(baseline, {"a": arm, "b": arm}, [[[5, 9, 3]]], params)
    assert {turn.layers_per_token for turn in (*base, *turns["a"], *turns["b"])} == {alone.layers_per_token}


def test_every_case_has_enough_groups_of_its_size() -> None:
    """An interval over two groups would be shown as one, or a batch of eight be measured with five sequences."""
    prompts = [[n] for n in range(12)]
    for case in cases((1, 8), (0.0, 0.8), prompts):
        assert len(case.groups) >= LEAST_GROUPS and {len(group) for group in case.groups} == {case.batch}
    assert [(c.batch, c.temperature) for c in cases((1, 8), (0.0, 0.8), prompts)] == [(1, 0.0), (8, 0.0), (1, 0.8)]


def test_a_turn_is_the_engines_own_work(load: Callable[..., Engine]) -> None:
    """The benchmark's counts would not be those of a request."""
    with load(policy="full") as engine:
        seen = LaunchCounts()
        with engine.with_options(replace(engine.options, policy="exact", max_batch=2), seen) as other:
            params = GenerationParams(max_new_tokens=6, ignore_eos=True)
            turn = EngineArm("exact", other).turn([[5, 9, 3], [7, 1]], params)
            assert turn.tokens == [list(one.token_ids) for one in engine.generate([[5, 9, 3], [7, 1]], params)]
        layers = layers_of(engine.manifest)
        assert layers[UNCUT_GRAPH] == engine.depth == sum(layers[s.name] for s in engine.manifest.segments)
        assert {launch.graph for launch in seen.counts} == {UNCUT_GRAPH} and turn.decoded == 10 and turn.seconds > 0


def test_texts_of_one_token_have_a_depth(load: Callable[..., Engine]) -> None:
    """A prompt that the model ends at once would end the benchmark: its token went through every layer."""
    with load() as engine:
        turn = EngineArm("auto", engine).turn([[5, 40, 99]], GenerationParams(max_new_tokens=1))
    assert turn.depth == engine.depth and turn.decoded == 0


def _row(arm: str, ratio: float, temperature: float = 0.0) -> dict[str, object]:
    speed = {"ratio_median": ratio, "ratio_low": ratio, "ratio_high": ratio, "ratio_total": ratio, "tokens_per_s": 900.0}
    place = {"model": "layerskip", "batch": 1, "temperature": temperature}
    return {"arm": arm, "title": arm, **place, **speed, "layers_per_token": 9.0, "groups": 2}


def test_results_have_the_names_that_the_bars_are_set_for() -> None:
    """A script that checks the bars would find nothing."""
    report = Report("policies_cpu")
    rows = [_row(BASELINE, 0.9), _row("exact_both", 1.8), _row("exit1", 1.3), _row("exact_both", 0.97, temperature=0.8)]
    report.rows = rows
    add_policy_results(report)
    assert report.results["exact_both_layerskip_b1"] == 1.8 and report.results["exit1_layerskip_b1"] == 1.3
    assert report.results["exact_both_layerskip_b1_t08"] == 0.97
    assert report.results["worst_case"] == 0.97  # the baseline is 1 by definition


def test_a_table_row_has_a_cell_for_every_heading() -> None:
    """Columns of the documentation's table would slip."""
    report = Report("policies_cpu", prompts=1, new_tokens=1)
    report.rows = [_row(BASELINE, 1.0) | {"other_load": 0.0}, _row("exact_both", 1.8) | {"other_load": 0.5}]
    add_tables(report)
    assert [row[2] for row in report.tables[0].rows] == [row["title"] for row in report.rows]


@pytest.fixture
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has ONNX Runtime sessions of other tests, so engines cannot have the pool that all must share."""
    options = EngineOptions(threads=ThreadOptions(1), prefix_cache=False, verify=False)
    monkeypatch.setattr(policy_arms, "load_second", lambda folder: Engine.load(folder, options))


def test_a_case_has_a_row_for_each_policy_and_full_first(exits_bundle: Path, own_pools: None) -> None:
    """A policy of the list would not run by the options that stand there, or `exact` have another text."""
    names = ["exact_none", "exact_both", "exit1"]
    case = Case(2, 0.0, [[[5, 9, 3], [7, 1, 4]], [[2, 2, 6], [8, 3, 1]]])
    rows, _ = run_case({1: exits_bundle, 5: exits_bundle}, names, case, 6)
    by_name = {row["arm"]: row for row in rows}
    assert list(by_name) == [BASELINE, *names] and all(row["groups"] == 2 for row in rows)
    assert by_name["exact_none"]["differing_tokens"] == by_name["exact_both"]["differing_tokens"] == 0
    assert not any(name.startswith("accepted") for name in by_name["exact_none"])


def test_a_rule_that_is_switched_off_is_priced(exits_bundle: Path) -> None:
    """The price of launches would be that of another variant, or of none."""
    with Engine.load(exits_bundle, EngineOptions(threads=ThreadOptions(1), prefix_cache=False)) as weights:
        rows = run_cell(weights, "exact", 1, 0.0, [[[5, 9, 3, 5, 9, 3]], [[7, 1, 4, 7, 1, 4]]], 12)
    assert [row["rule"] for row in rows] == [name for name, rule in RULES.items() if "exact" in rule.policies]
    assert all(np.isfinite([row["simulated_pct"], row["measured_pct"]]).all() for row in rows)
    unchanged = next(row for row in rows if row["rule"] == "padding_penalty")
    assert unchanged["simulated_pct"] == pytest.approx(0, abs=1e-6), "a text alone has no padding"


def test_a_rule_is_held_against_the_same_task_of_the_same_round() -> None:
    """One long task, or one slow moment, would decide what a rule earns."""
    default, without, full = [[1.0, 9.0, 1.0], [8.0] * 3, [2.0] * 3], [[2.0, 18.0, 1.0], [8.0] * 3, [2.0] * 3], [[2.0] * 3] * 3
    figures = task_figures(["chat", "chat", "code"], without, default, full)
    assert figures["best_kind_pct"] == pytest.approx(100 * (2**0.5 - 1))  # two tasks: twice as long, and the same
    assert figures["worst_kind_pct"] == pytest.approx(0) and figures["measured_pct"] == pytest.approx(100 * (2**0.25 - 1))
    assert figures["worst_vs_full"] == pytest.approx(0.25)


def test_what_controls_drafting_stays_small() -> None:
    """Rules would come back one by one, each with its constants; two are of loops as rows."""
    constants, lines = drafting_size()
    assert 0 < constants <= 17 and 0 < lines <= 700
